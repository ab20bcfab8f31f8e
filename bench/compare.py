#!/usr/bin/env python3
"""Prints the table of prl against the peer from their two JSON files, as Markdown, with medians, spreads and ratios."""
import json
import statistics
import sys

TITLES = {"decode_many": "decode, {sequences} sequences", "decode_one": "decode, 1 sequence", "train": "training step, {train_tokens} packed tokens"}


def spread(values):
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main():
    ours, peer = (json.load(open(path)) for path in sys.argv[1:3])
    where = f"{ours['device']}" if ours["device"] != "cpu" else f"{ours['cpu']}, {ours['threads']} threads"
    print(f"{where}; torch {peer['torch']}, transformers {peer['transformers']}\n")
    print("| work | prl tok/s, median (range) | dtype | share | peer tok/s, median (range) | dtype | ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in ours["rows"]:
        share = f"{100 * row['share']:.0f}% of " + ("bandwidth" if row["work"].startswith("decode") else "peak") if row.get("share") else ""
        title = TITLES.get(row["work"], row["work"]).format(**{k: f"{v:,}" for k, v in ours.get("sizes", {}).items()})
        for other in (r for r in peer["rows"] if r["work"] == row["work"]):
            ratio = statistics.median(row["tokens_per_s"]) / statistics.median(other["tokens_per_s"])
            print(f"| {title} | {spread(row['tokens_per_s'])} | {row['dtype']} | {share} | "
                  f"{spread(other['tokens_per_s'])} | {other['dtype']} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
