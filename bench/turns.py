#!/usr/bin/env python3
"""Two builds of prl in turns: each of `prl bench`'s rows with both, and how much slower the second one is.

    python3 bench/turns.py OLD NEW --suites train,decode --rounds 3 -- --shape qwen3-0.6b --compute.device cuda

A round runs each suite with both, the other one first in every second round, so that drift of the machine falls on both. The ratio is that of the medians
over all rounds and repeats (of --together the median of the rounds' ratios); its interval is the 95% one of a bootstrap over rounds.

--together runs both at the same time instead, each on half of the cores, which they change after each round: for machines whose other tenants make
runs one after the other incomparable. What both share (memory) is then shared evenly, so a difference in memory traffic shows less.
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


def measure(sides, suite, flags, scratch, cores=None):
    """{side: {row: rates}} of builds that run at the same time, each on its own set of `cores` if these are given."""
    running = []
    for i, (name, prl) in enumerate(sides):
        out = pathlib.Path(scratch) / f"{name}.json"
        out.unlink(missing_ok=True)
        command = [prl, "bench", suite, "--output-json", str(out), *flags]
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores[i])), *command]
        running.append((name, out, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)))
    found = {}
    for name, out, process in running:
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(f"{name}, bench {suite}: {errors[-2000:]}")
        found[name] = {f"{row['work']} {row['dtype']}": row["tokens_per_s"] for row in json.loads(out.read_text())["rows"]}
    return found


def ratio_of(old, new, rounds, together):
    """Over these rounds. Builds that ran together are compared round by round: what slowed one of them slowed the other."""
    if together:
        return statistics.median(statistics.median(new[r]) / statistics.median(old[r]) for r in rounds)
    return statistics.median(x for r in rounds for x in new[r]) / statistics.median(x for r in rounds for x in old[r])


def interval(old, new, together):
    draw = random.Random(0)
    ratios = sorted(ratio_of(old, new, [draw.randrange(len(old)) for _ in old], together) for _ in range(2000))
    return ratios[50], ratios[-50]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--suites", default="train,decode,prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", action="store_true")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.flags = words[end + 1:]
    found = {}
    all_cores = sorted(os.sched_getaffinity(0))
    halves = [all_cores[:len(all_cores) // 2], all_cores[len(all_cores) // 2:]]
    if options.together and not halves[0]:
        sys.exit("--together needs two cores")
    with tempfile.TemporaryDirectory(prefix="prl-turns-") as scratch:
        for turn in range(options.rounds):
            for suite in options.suites.split(","):
                sides = [("old", os.path.abspath(options.old)), ("new", os.path.abspath(options.new))]
                sides = sides if turn % 2 == 0 else sides[::-1]
                for at_once in [sides] if options.together else [[side] for side in sides]:
                    for name, rows in measure(at_once, suite, options.flags, scratch, halves if options.together else None).items():
                        for work, values in rows.items():
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
        ratio = ratio_of(sides["old"], sides["new"], range(len(sides["old"])), options.together)
        low, high = interval(sides["old"], sides["new"], options.together)
        print(f"| {work} | {cells[0]} | {cells[1]} | {ratio:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
