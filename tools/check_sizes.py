#!/usr/bin/env python3
"""Fails when a function of host code in src/ is longer than 80 lines, or a class has more than 25 methods.

    tools/check_sizes.py           checks
    tools/check_sizes.py --list    prints the longest functions and the largest classes

Exceptions of today are in tools/size_exceptions.txt, a line each: "function FILE NAME LINES" or "class FILE NAME METHODS". An exception may
shrink and not grow, and one that is no longer needed must go. Tests and device code (*.cu, *.cuh) are not looked at. Lines are counted from
the first of the signature to the closing brace; constructors, destructors and what is defaulted or deleted are no methods.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / "tools/size_exceptions.txt"
MAX_LINES = 80
MAX_METHODS = 25
IS_TEST = re.compile(r"_test\.cpp$|_bench\.cpp$|/testing/|test_support\.hpp$|_cases\.hpp$")
CLASS = re.compile(r"\b(class|struct|union)\s+(?:alignas\([^)]*\)\s*)?([\w:]+)[^()]*$")


def without_text(source):
    """The source with comments, literals and preprocessor lines blanked; newlines stay."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group(0))

    token = r'R"([^(\s]*)\((?:.|\n)*?\)\1"|//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"' + r"|(?<![\w])'(?:\\.|[^'\\\n])+'"
    source = re.sub(token, blank, source)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, source, flags=re.M)


def without_template_arguments(text):
    while True:
        shorter = re.sub(r"<[^<>()]*(?:\([^()]*\)[^<>()]*)*>", "", text)
        if shorter == text:
            return text
        text = shorter


def method_name(statement, class_name):
    """The name of the method that a statement in a class declares; None for anything else."""
    text = without_template_arguments(re.sub(r"\b(public|private|protected)\s*:", "", statement)).strip()
    if re.match(r"(using|friend|typedef|static_assert|enum)\b", text) or re.search(r"=\s*(default|delete)\s*$", text):
        return None
    match = re.search(r"(operator\s*[^\s\w]{1,3}|operator\s+\w[\w:]*|~?\w+)\s*\(", text)
    if not match or "=" in text[:match.start()] or text[match.end():].lstrip().startswith("*"):
        return None
    name = match.group(1)
    if name in ("explicit", "noexcept", "alignas", "decltype") or name.lstrip("~") == class_name:
        return None
    return name


def measure(path):
    """[(kind, name, size, line)] of one file."""
    source = without_text(path.read_text(errors="replace"))
    out = []
    stack = []  # (kind, name, line of the statement, [methods])
    begin = 0  # of the statement
    parentheses = 0
    for i, c in enumerate(source):
        if c in "([":
            parentheses += 1
        elif c in ")]":
            parentheses -= 1
        elif c == ";" and parentheses == 0 or c == "{":
            head = source[begin:i]
            outer = stack[-1] if stack else ("namespace", "", 0, [])
            if c == ";":
                if outer[0] == "class" and (name := method_name(head, outer[1])):
                    outer[3].append(name)
                begin = i + 1
                continue
            line = source.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1
            plain = without_template_arguments(head)
            if parentheses > 0 or outer[0] in ("function", "other"):
                kind, name = "other", ""
            elif re.search(r"\bnamespace\b", plain) or re.search(r'\bextern\s*$', plain):
                kind, name = "namespace", ""
            elif match := CLASS.search(plain.split("=")[-1] if "(" in plain else plain):
                kind, name = "class", match.group(2).split("::")[-1]
            elif "(" in plain and not re.search(r"=\s*$", plain) and not re.search(r"\benum\b", plain):
                match = re.search(r"([\w:~]+|operator\s*\S+)\s*\(", plain)
                kind, name = "function", match.group(1) if match else "?"
                if outer[0] == "class" and (method := method_name(head.split(" : ")[0], outer[1])):
                    outer[3].append(method)
            else:
                kind, name = "other", ""
            stack.append((kind, name, line, [], parentheses))
            parentheses = 0
            begin = i + 1
        elif c == "}" and stack:
            kind, name, line, methods, parentheses = stack.pop()
            if kind == "function":
                out.append(("function", name, source.count("\n", 0, i) + 1 - line + 1, line))
            elif kind == "class":
                out.append(("class", name, len(methods), line))
            if kind in ("namespace", "function") or (kind == "other" and parentheses == 0 and source[i + 1:i + 2] not in ",;)"):
                begin = i + 1
    return out


def read_exceptions():
    found = {}
    for line in EXCEPTIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, file, name, size = line.split()
            found[kind, file, name] = int(size)
    return found


def main():
    everything = []
    for path in sorted((ROOT / "src").rglob("*")):
        file = str(path.relative_to(ROOT))
        if path.suffix in {".hpp", ".cpp"} and not IS_TEST.search(file):
            everything += [(kind, file, name, size, line) for kind, name, size, line in measure(path)]
    if "--list" in sys.argv:
        for kind in ("function", "class"):
            for _, file, name, size, line in sorted((e for e in everything if e[0] == kind), key=lambda e: -e[3])[:40]:
                print(f"{size:5} {kind} {file}:{line} {name}")
        return 0
    problems, allowed = [], read_exceptions()
    seen = set()
    for kind, file, name, size, line in everything:
        limit = MAX_LINES if kind == "function" else MAX_METHODS
        if size <= limit:
            continue
        unit = "lines" if kind == "function" else "methods"
        seen.add((kind, file, name))
        if size > allowed.get((kind, file, name), limit):
            problems.append(f"{file}:{line}: {kind} {name} has {size} {unit}, {limit} is the limit: split it")
    for kind, file, name in sorted(set(allowed) - seen):
        problems.append(f"tools/size_exceptions.txt: {kind} {name} of {file} needs no exception any more: remove the line")
    print("\n".join(problems) or f"sizes: {len(everything)} functions and classes, {len(allowed)} exceptions")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
