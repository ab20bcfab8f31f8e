#!/usr/bin/env python3
"""Writes math_verify.json: 2,000 pairs of a wanted and a given answer with the verdict of math-verify 0.9.0 (pip install math-verify==0.9.0), as
verifiers' MathRubric asks it. Run by its interpreter; the pairs come from a seed."""
import json
import pathlib
import random
from fractions import Fraction

from math_verify import parse, verify

rng = random.Random(23)
WORDS = ["Tuesday", "blue", "Evelyn", "odd", "\\text{east}", "(C)", "B", "\\text{No}", "yes"]


def frac(value):
    sign = "-" if value < 0 else ""
    return f"{sign}\\{rng.choice(['frac', 'dfrac', 'tfrac'])}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def spellings(value):
    """Ways to write a rational number that people and models use."""
    ways = [f"{value.numerator}/{value.denominator}", frac(value)] if value.denominator > 1 else [str(value), f"{value}.0", f"{value}."]
    if value.denominator in (1, 2, 4, 5, 8, 10, 20, 25):
        ways.append(str(float(value)) if value.denominator > 1 else f"{int(value):,}")
    if value.denominator > 1 and abs(value) > 1 and value > 0:
        whole = value.numerator // value.denominator
        rest = value - whole
        ways.append(f"{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}")
    text = rng.choice(ways)
    dressed = [text] * 6 + [f"${text}$", f" {text} ", f"x = {text}", f"\\boxed{{{text}}}", f"\\left({text}\\right)", f"\\${text}", f"{text}\\%", f"{text}^\\circ", f"{text} \\text{{ cm}}", f"{text} dollars"]
    return rng.choice(dressed)


def number():
    return Fraction(rng.randint(-30, 2000), rng.choice([1, 1, 1, 2, 3, 4, 5, 7, 8, 12]))


def near(value):
    return rng.choice([value, value, value + 1, -value, value + Fraction(1, 100), value * 10, 1 / value if value else value])


def rational_pair():
    value = number()
    return spellings(value), spellings(near(value))


def tuple_pair():
    values = [number() for _ in range(rng.choice([2, 2, 3]))]
    other = [near(value) if rng.random() < 0.3 else value for value in values]
    if rng.random() < 0.15:
        rng.shuffle(other)

    def write(items):
        inner = rng.choice([", ", ","]).join(str(v) if v.denominator == 1 else frac(v) for v in items)
        left, right = rng.choice([("(", ")")] * 4 + [("\\left(", "\\right)"), ("", ""), ("[", "]"), ("\\{", "\\}")])
        return f"{left}{inner}{right}"

    return write(values), write(other)


def algebra_pair():
    a, b, c = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 12)
    same = [
        (f"{a}x+{b}", f"{b}+{a}x"), (f"x^2+{a}x", f"x(x+{a})"), (f"\\sqrt{{{c * c * 2}}}", f"{c}\\sqrt{{2}}"), (f"{a}\\pi", f"{a} \\pi"),
        (f"{a}\\sqrt{{{c}}}", f"{a}\\sqrt{{{c}}}"), (f"\\frac{{\\pi}}{{{c}}}", f"\\pi/{c}"), (f"2^{{{a}}}", str(2**a)), (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a}"),
        (f"{a}+{b}i", f"{b}i+{a}"), (f"x \\le {a}", f"{a} \\ge x"), (f"({a},\\infty)", f"x>{a}"), (f"{a}!", str([1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880][a])),
        (f"y={a}x+{b}", f"y = {b} + {a}x"), (f"{a}x-{b}y", f"-{b}y+{a}x"), (f"\\frac{{{a}}}{{\\sqrt{{{c}}}}}", f"\\frac{{{a}\\sqrt{{{c}}}}}{{{c}}}"),
        (f"\\log_2({2**a})", str(a)), (f"{a}\\cdot 10^{{{b}}}", f"{a * 10**b}"), (f"p - q", "p-q"), (f"{a}\\text{{ and }}{b}", f"{a},{b}"),
    ]
    wanted, given = rng.choice(same)
    if rng.random() < 0.35:
        given = given.replace(str(a), str(a + 1), 1)
    return wanted, given


def word_pair():
    word = rng.choice(WORDS)
    other = rng.choice([word, word, word.lower(), f"\\text{{{word}}}" if "\\" not in word else word, word + ".", rng.choice(WORDS), f"\\textbf{{{word}}}" if "\\" not in word else word])
    return word, other


def verdict(wanted, given):
    try:
        return bool(verify(parse(f"\\boxed{{{wanted}}}", parsing_timeout=5), parse(f"\\boxed{{{given}}}", parsing_timeout=5), timeout_seconds=5))
    except Exception:
        return False


rows = []
for kind, make, count in (("number", rational_pair, 1200), ("tuple", tuple_pair, 300), ("algebra", algebra_pair, 350), ("word", word_pair, 150)):
    for _ in range(count):
        wanted, given = make()
        rows.append([kind, wanted, given, verdict(wanted, given)])
path = pathlib.Path(__file__).with_name("math_verify.json")
path.write_text("[" + ",\n".join(json.dumps(row) for row in rows) + "]\n")
print(f"{len(rows)} pairs, {sum(row[3] for row in rows)} equal")
