#!/usr/bin/env python3
"""Prints what failed in a log of ctest: each failed program, its failed tests, and what those printed.

A program that fails prints all that its tests said, thousands of lines where it has hundreds of tests; the few that matter are cut out here.
Usage: tools/failed_tests.py LOG
"""
import re
import sys

MAX_LINES = 40  # of one failed test
MAX_TESTS = 10  # of one program

RESULT = re.compile(r"^ *\d+/\d+ Test +#\d+: (\S+) \.*(?: *Passed|\*\*\*(\S[^0-9]*?)) +[\d.]+ sec")
START = re.compile(r"^ +Start +\d+: ")


def programs(lines):
    """(name, verdict, lines that it printed) of each program that failed."""
    name, verdict, printed = None, None, []
    for line in [*lines, "100% tests passed"]:
        result = RESULT.match(line)
        if result or re.match(r"^\d+% tests passed", line):
            if name:
                yield name, verdict, printed
            name, verdict, printed = None, None, []
            if result and result.group(2) and not result.group(2).startswith("Skipped"):
                name, verdict = result.group(1), result.group(2)
        elif name and not START.match(line):
            printed.append(line)


def failures(printed):
    """The lines of each failed test of a program: of GoogleTest, of unittest, else the last ones."""
    found, test = [], []
    for line in printed:
        if line.startswith("[ RUN      ]"):
            test = []
        test.append(line)
        if line.startswith("[  FAILED  ]") and test[0].startswith("[ RUN      ]"):
            found.append(test)
        if re.match(r"\[ +(FAILED|OK|SKIPPED) +\]", line):
            test = [""]
    if found:
        return found
    for block in re.split(r"\n(?==+\n(?:FAIL|ERROR): )", "\n".join(printed))[1:]:
        found.append(block.split("\n"))
    return found or [printed[-MAX_LINES:]]


def shortened(lines):
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    return [*lines[:half], f"[{len(lines) - 2 * half} lines are left out]", *lines[-half:]]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tools/failed_tests.py LOG")
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        lines = log.read().splitlines()
    for name, verdict, printed in programs(lines):
        tests = failures(printed)
        print(f"\n---- {name}: {verdict}")
        for test in tests[:MAX_TESTS]:
            print("\n".join(shortened(test)))
        if len(tests) > MAX_TESTS:
            print(f"[{len(tests) - MAX_TESTS} more failed tests of {name} are left out]")


if __name__ == "__main__":
    main()
