#!/usr/bin/env python3
"""Draws the reward of an RL run: FOLDER/metrics.csv and FOLDER/curve.svg from a run's metrics.jsonl, or the curve again from the CSV.

    python3 tools/run_curve.py outputs/RUN/metrics.jsonl FOLDER
    python3 tools/run_curve.py FOLDER/metrics.csv FOLDER

Columns: step; reward (mean of the batch); eval (mean avg@k of the environments, after that many steps); loss, entropy, mismatch_kl of the
trainer; seconds since the start, when the trainer's step ended. Row 0 is the evaluation before training. What was not measured is empty.
"""
import csv
import json
import pathlib
import re
import sys

COLUMNS = ["step", "reward", "eval", "loss", "entropy", "mismatch_kl", "seconds"]
TAKEN = {"reward/all/mean": "reward", "loss/mean": "loss", "entropy/all/mean": "entropy", "mismatch_kl/all/mean": "mismatch_kl"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 52, 16, 40, 44
REWARD, EVAL, GRID, TEXT = "#9db8d9", "#c0392b", "#dddddd", "#333333"


def rows_of(lines):
    """One row per step of metrics.jsonl, where each role wrote a line of its own."""
    rows, start = {}, None
    for line in lines:
        values = json.loads(line)
        row = rows.setdefault(values["step"], {"step": values["step"]})
        scores = [(key, value) for key, value in values.items() if re.fullmatch(r"eval/[^/]+/avg@\d+", key)]
        if start is None:  # the first line is written when what it describes has ended
            durations = [values.get("time/step", 0)] + [value for key, value in values.items() if re.fullmatch(r"eval/[^/]+/time", key)]
            start = values["time"] - max(durations)
        if scores:
            row["eval"] = sum(value for _, value in scores) / len(scores)
        row.update((column, values[key]) for key, column in TAKEN.items() if key in values)
        if "loss/mean" in values or values["step"] == 0:
            row["seconds"] = values["time"] - start
    return [rows[step] for step in sorted(rows)]


def write_csv(rows, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([f"{row[column]:.6g}" if column in row else "" for column in COLUMNS])


def read_csv(path):
    with open(path, newline="") as file:
        return [{column: float(value) for column, value in row.items() if value} for row in csv.DictReader(file)]


def svg_of(rows):
    rewards = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    evals = [(row["step"], row["eval"]) for row in rows if "eval" in row]
    last = max(row["step"] for row in rows)
    values = [value for _, value in rewards + evals]
    low, high = min(0.0, *values), max(1.0, *values)
    x_of = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last
    y_of = lambda value: TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
    path = lambda points: " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in points)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           f'font-family="sans-serif" font-size="12" fill="{TEXT}">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in range(6):
        value = low + (high - low) * i / 5
        y = y_of(value)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    stride = max(1, round(last / 6))
    for step in range(0, int(last) + 1, stride):
        out.append(f'<text x="{x_of(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">training steps</text>')
    out.append(f'<polyline points="{path(rewards)}" fill="none" stroke="{REWARD}" stroke-width="1.5"/>')
    out.append(f'<polyline points="{path(evals)}" fill="none" stroke="{EVAL}" stroke-width="2"/>')
    for step, value in evals:
        out.append(f'<circle cx="{x_of(step):.1f}" cy="{y_of(value):.1f}" r="4" fill="{EVAL}"/>')
        out.append(f'<text x="{min(max(x_of(step), LEFT + 20), WIDTH - RIGHT - 20):.1f}" y="{y_of(value) - 10:.1f}" text-anchor="middle" fill="{EVAL}">{value:.3f}</text>')
    for x, colour, label in ((LEFT, EVAL, "held-out questions"), (LEFT + 160, REWARD, "training batch")):
        out.append(f'<rect x="{x}" y="16" width="18" height="4" fill="{colour}"/><text x="{x + 24}" y="22">{label}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".csv":
        rows = read_csv(source)
    else:
        rows = rows_of(source.read_text().splitlines())
        write_csv(rows, folder / "metrics.csv")
        rows = read_csv(folder / "metrics.csv")
    (folder / "curve.svg").write_text(svg_of(rows))


main()
