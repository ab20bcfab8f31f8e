#!/usr/bin/env python3
"""Two builds of prl in turns: each of `prl bench`'s rows with both, and how much slower the second one is.

    python3 bench/turns.py OLD NEW --suites train,decode --rounds 3 -- --shape qwen3-0.6b --compute.device cuda

A round runs each suite with both, the other one first in every second round, so that drift of the machine falls on both. The ratio is that of the medians
over all rounds and repeats; its interval is the 95% one of a bootstrap over rounds.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile


def measure(prl, suite, flags, scratch):
    out = pathlib.Path(scratch) / "out.json"
    out.unlink(missing_ok=True)
    done = subprocess.run([prl, "bench", suite, "--output-json", str(out), *flags], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{prl} bench {suite}: {done.stderr[-2000:]}")
    return {f"{row['work']} {row['dtype']}": row["tokens_per_s"] for row in json.loads(out.read_text())["rows"]}


def interval(old, new):
    draw = random.Random(0)
    ratios = []
    for _ in range(2000):
        rounds = [draw.randrange(len(old)) for _ in old]
        ratios.append(statistics.median(x for r in rounds for x in new[r]) / statistics.median(x for r in rounds for x in old[r]))
    ratios.sort()
    return ratios[50], ratios[-50]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--suites", default="train,decode,prefill")
    parser.add_argument("--rounds", type=int, default=3)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.flags = words[end + 1:]
    found = {}
    with tempfile.TemporaryDirectory(prefix="prl-turns-") as scratch:
        for turn in range(options.rounds):
            for suite in options.suites.split(","):
                sides = [("old", options.old), ("new", options.new)]
                for name, prl in sides if turn % 2 == 0 else sides[::-1]:
                    for work, values in measure(os.path.abspath(prl), suite, options.flags, scratch).items():
                        found.setdefault(work, {}).setdefault(name, []).append(values)
    print("| work, per second | old | new | new / old | 95% of it |\n|---|---|---|---|---|")
    for work, sides in found.items():
        if len(sides) < 2:
            print(f"| {work} | {'only the ' + next(iter(sides))} has it | | | |")
            continue
        cells = []
        for name in ("old", "new"):
            values = [x for repeats in sides[name] for x in repeats]
            cells.append(f"{statistics.median(values):,.5g} ({min(values):,.5g} to {max(values):,.5g})")
        ratio = statistics.median(x for r in sides["new"] for x in r) / statistics.median(x for r in sides["old"] for x in r)
        low, high = interval(sides["old"], sides["new"])
        print(f"| {work} | {cells[0]} | {cells[1]} | {ratio:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
