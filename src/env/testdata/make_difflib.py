#!/usr/bin/env python3
"""Writes difflib.json: texts with the ratio and the matching blocks that CPython's difflib finds. Standard library only."""
import difflib
import json
import pathlib
import random

rng = random.Random(11)
words = ["the", "water", "people", "sentence", "through", "a", "zebra", "na\u00efve", "\u6f22\u5b57", "\U0001f600\u200d", "e\u0301"]


def letters(n, alphabet):
    return "".join(rng.choice(alphabet) for _ in range(n))


def edited(text, edits):
    chars = list(text)
    for _ in range(edits):
        kind, at = rng.randrange(3), rng.randrange(len(chars) + 1)
        if kind == 0:
            chars.insert(at, rng.choice("abcdxyz \n"))
        elif chars and kind == 1:
            del chars[min(at, len(chars) - 1)]
        elif chars:
            chars[min(at, len(chars) - 1)] = rng.choice("abcdxyz")
    return "".join(chars)


pairs = [("", ""), ("a", ""), ("", "a"), ("abc", "abc"), ("abcd", "bcde"), ("aaaa", "aa"), ("qabxcd", "abycdf"), (" abcd", "abcd abcd"),
         ("tide", "diet"), ("diet", "tide"), ("private volatile", "volatile private"), ("ab" * 30, "ba" * 30)]
for _ in range(25):
    text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 12)))
    pairs.append((edited(text[::-1], rng.randrange(0, 6)), text[::-1]))
# From 200 characters on the junk rule applies to the second text.
for n in (198, 199, 200, 201, 250, 400):
    for alphabet in ("ab", "abcdefghijklmnopqrstuvwxyz ", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"):
        text = letters(n, alphabet)
        pairs.append((edited(text, 12), text))
        pairs.append((text, edited(text, 30)))
long_text = letters(300, "abcdefghij") + "Q" + letters(300, "klmnopqrst")
pairs.append((long_text[40:], long_text))
pairs.append((letters(220, "xy"), long_text))

cases = []
for a, b in pairs:
    matcher = difflib.SequenceMatcher(None, a, b)
    cases.append({"a": a, "b": b, "ratio": matcher.ratio().hex(), "blocks": [list(m) for m in matcher.get_matching_blocks()]})
path = pathlib.Path(__file__).with_name("difflib.json")
path.write_text(json.dumps(cases, separators=(",", ":")) + "\n")
print(len(cases), "cases", path.stat().st_size, "bytes")
