#!/usr/bin/env python3
"""`prl plan` beside runs: SFT on CPU ranks whose link is held to a rate (PRL_COMM_BANDWIDTH), as a Markdown table.

    python3 bench/plan.py [--prl build/release/bin/prl] [--steps 6]

A run of one rank says what part of the measured peak training reaches here; all else is foretold. Times are medians of the steps but the first.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "integration"))
import harness  # noqa: E402

SEQ_LEN, ROWS = 256, 4


def run(prl, *words, **variables):
    done = subprocess.run([prl, *map(str, words)], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables})
    if done.returncode:
        sys.exit(f"prl {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return done.stdout


def measured(prl, folder, ranks, rate, steps):
    out = folder / f"{ranks}-{rate}"
    variables = {"PRL_COMM_BANDWIDTH": str(rate)} if rate else {}
    run(prl, "sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", SEQ_LEN, "--data.batch-size", ROWS,
        "--max-steps", steps, "--deployment.num-gpus", ranks, "--compute.dtype", "float32", "--output-dir", out, **variables)
    rows = [row for step, row in sorted(harness.metrics(out).items()) if step > 1]
    return [statistics.median(row[key] for row in rows) for key in ("time/forward_backward", "time/optimizer")]


def foretold(prl, folder, ranks, rate, efficiency):
    words = ["--num-devices", ranks, "--num-rows", ROWS, "--seq-len", SEQ_LEN, "--dtype", "float32", "--card", "local", "--assume-efficiency",
             efficiency, "--assume-latency", 100, "--json"]
    if rate:
        words += ["--assume-bandwidth", rate / 1e9]
    return json.loads(run(prl, "plan", folder / "model", *words))["seconds"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prl", default="build/release/bin/prl")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prl-plan-") as scratch:
        folder = pathlib.Path(scratch)
        run(options.prl, "init-model", folder / "model", "--vocab-size", 2048, "--hidden-size", 256, "--intermediate-size", 768, "--num-layers", 4,
            "--num-heads", 4, "--num-kv-heads", 4)
        harness.sft_data(folder / "data.jsonl", 64)
        alone = measured(options.prl, folder, 1, None, options.steps)
        efficiency = min(1.0, foretold(options.prl, folder, 1, None, 1.0)["compute"] / alone[0])
        print(f"One rank: forward and backward {alone[0]:.3f} s, {100 * efficiency:.0f}% of the peak measured just before; load {os.getloadavg()[0]:.1f}\n")
        print("| ranks | link | foretold: compute + exchange | measured | error | foretold: optimizer + gather | measured | error | step |")
        print("|---|---|---|---|---|---|---|---|---|")
        for ranks, rate in ((2, 5e6), (2, 20e6), (2, 100e6), (3, 5e6), (3, 20e6), (4, 5e6)):
            plan = foretold(options.prl, folder, ranks, rate, efficiency)
            first, second = measured(options.prl, folder, ranks, rate, options.steps)
            told = plan["compute"] + plan["exchange"], plan["optimizer"] + plan["gather"]
            errors = [f"{100 * (t / m - 1):+.0f}%" for t, m in zip(told, (first, second))]
            total = f"{100 * (sum(told) / (first + second) - 1):+.0f}%"
            print(f"| {ranks} | {rate / 1e6:g} MB/s | {plan['compute']:.3f} + {plan['exchange']:.3f} s | {first:.3f} s | {errors[0]} | "
                  f"{plan['optimizer']:.3f} + {plan['gather']:.3f} s | {second:.3f} s | {errors[1]} | {total} |", flush=True)


if __name__ == "__main__":
    main()
