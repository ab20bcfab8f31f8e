#!/usr/bin/env python3
"""Fails for a C++ test that cannot fail: no assertion in its body, nor in a function or macro of the tests that it names."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSERTION = re.compile(r'\b(EXPECT|ASSERT)_[A-Z_]+\s*\(|\bFAIL\s*\(|\bADD_FAILURE\s*\(')
TEST = re.compile(r'^(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)\s*\{', re.M)
FUNCTION = re.compile(r'\b([A-Za-z_]\w*)\s*\([^;{}]*\)\s*(?:const\s*)?(?:noexcept\s*)?(?:override\s*)?\{')
MACRO = re.compile(r'#\s*define\s+(\w+)((?:[^\n]*\\\n)*[^\n]*)')
WORDS = re.compile(r'\b([A-Za-z_]\w*)\s*(?:<[^<>;(){}]*>)?\s*\(')
COMMENT_OR_TEXT = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.S)
KEYWORDS = {"if", "for", "while", "switch", "catch", "return", "TEST", "TEST_F", "TEST_P"}


def body_at(text, brace):
    """Text from an opening brace to its closing one."""
    depth = 0
    for i in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[brace:i + 1]
    return text[brace:]


def read(path):
    return COMMENT_OR_TEXT.sub(lambda m: '""' if m.group(0)[0] in "R\"" else " ", path.read_text(errors="replace"))


def helpers_of(texts):
    """Names of functions and macros that assert, themselves or through each other."""
    bodies = {}
    for text in texts:
        for match in FUNCTION.finditer(text):
            if match.group(1) not in KEYWORDS:
                bodies.setdefault(match.group(1), []).append(body_at(text, match.end() - 1))
        for match in MACRO.finditer(text):
            bodies.setdefault(match.group(1), []).append(match.group(2))
    asserting = {name for name, parts in bodies.items() if any(ASSERTION.search(part) for part in parts)}
    while True:
        more = {name for name, parts in bodies.items() if name not in asserting and any(asserting & set(WORDS.findall(part)) for part in parts)}
        if not more:
            return asserting
        asserting |= more


def main():
    problems, num_tests = [], 0
    for folder in [*sorted(path for path in (ROOT / "src").iterdir() if path.is_dir()), ROOT / "tests"]:
        texts = {path: read(path) for pattern in ("*.hpp", "*.cpp", "*.cu", "*.cuh") for path in folder.rglob(pattern)
                 if "test" in path.name or "test" in path.parent.name or "conformance" in str(path)}
        shared = [text for path, text in texts.items() if path.suffix in {".hpp", ".cuh"}]
        for path, text in sorted(texts.items()):
            tests = list(TEST.finditer(text))
            asserting = helpers_of([text, *shared]) if tests else set()
            for match in tests:
                num_tests += 1
                body = body_at(text, match.end() - 1)
                if not ASSERTION.search(body) and not asserting & set(WORDS.findall(body)):
                    line = text.count("\n", 0, match.start()) + 1
                    problems.append(f"{path.relative_to(ROOT)}:{line}: {match.group(1)}.{match.group(2)} asserts nothing")
    print("\n".join(problems) or f"tests: {num_tests}, each with an assertion")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
