#!/usr/bin/env python3
"""Fails when docs/developers/where.md names a file that does not exist, or a name that the file before it does not hold.

In a row of its table, code in backquotes with a slash is a file; every other one is a name that must occur, as a word, in the file named
last before it in the same cell. The first column must hold exactly the behaviours in WANTED, and each needs a file and a test.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/developers/where.md"
WANTED = {
    "overlong prompt", "stale cancel", "zero-advantage drop", "stop strings", "size of the KV cache", "evaluation during training",
    "AdamW's arithmetic", "weight transport", "difficulty pools", "retries",
}


def holds(path, name):
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (ROOT / path).read_text(errors="replace")) is not None


def problems_of_cell(row, cell):
    problems, path, num_names = [], None, 0
    for code in re.findall(r"`([^`]+)`", cell):
        if "/" in code:
            path = code
            if not (ROOT / path).is_file():
                problems.append(f"{row}: there is no file {path}")
        elif path is None:
            problems.append(f"{row}: `{code}` stands before any file")
        elif (ROOT / path).is_file() and not holds(path, code):
            problems.append(f"{row}: {path} does not hold `{code}`")
        else:
            num_names += 1
    if path is None or num_names == 0:
        problems.append(f"{row}: a cell names no file with a name in it: {cell.strip()}")
    return problems


def main():
    rows = [line.strip().strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    problems = [f"`{name}` has no row" for name in sorted(WANTED - {row[0].strip() for row in rows})]
    for behaviour, *cells in rows:
        if behaviour.strip() not in WANTED:
            problems.append(f"`{behaviour.strip()}` is not among the behaviours that {pathlib.Path(__file__).name} wants")
        if len(cells) != 2:
            problems.append(f"{behaviour.strip()}: {len(cells) + 1} columns, 3 are wanted")
        for cell in cells:
            problems += problems_of_cell(behaviour.strip(), cell)
    for problem in problems:
        print(f"docs/developers/where.md: {problem}")
    if not problems:
        print(f"where: {len(rows)} behaviours, every file and name exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
