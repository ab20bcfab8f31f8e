#!/usr/bin/env python3
"""Prints the table of prl against the peer from their two JSON files, as Markdown, with medians, spreads and ratios."""
import json
import platform
import statistics
import sys

WANTED = {"decode_many": 3.0, "train": 1.5}
TITLES = {"decode_many": "decode, 32 sequences", "decode_one": "decode, 1 sequence", "train": "training step, 4,096 packed tokens"}


def spread(values):
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main():
    ours, peer = (json.load(open(path)) for path in sys.argv[1:3])
    print(f"CPU {ours['cpu'] or platform.processor()}, {ours['threads']} threads; torch {peer['torch']}, transformers {peer['transformers']}\n")
    print("| work | prl tok/s, median (range) | dtype | share | peer tok/s, median (range) | dtype | ratio | wanted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in ours["rows"]:
        share = f"{100 * row['share']:.0f}% of " + ("bandwidth" if row["work"] == "decode_one" else "peak") if row.get("share") else ""
        for other in (r for r in peer["rows"] if r["work"] == row["work"]):
            ratio = statistics.median(row["tokens_per_s"]) / statistics.median(other["tokens_per_s"])
            wanted = f"{WANTED[row['work']]:.1f}x" if row["work"] in WANTED else ""
            print(f"| {TITLES[row['work']]} | {spread(row['tokens_per_s'])} | {row['dtype']} | {share} | "
                  f"{spread(other['tokens_per_s'])} | {other['dtype']} | {ratio:.2f}x | {wanted} |")


if __name__ == "__main__":
    main()
