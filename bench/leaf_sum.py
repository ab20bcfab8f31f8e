#!/usr/bin/env python3
"""What the sum of leaves costs on one rank: steps of 1, 2, 4, 8 rows with model.reduce = "exact" and "fast", in turns.

usage: bench/leaf_sum.py [PRL] [REPEATS]. A model of 3.4 million parameters, rows of 256 tokens, one thread. Prints processor time per step,
which other tenants of a machine change less than they change the time that passes: median of the repeats (least to greatest), what a run
of no steps takes being left out, and the ratio."""
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

STEPS, ROW_TOKENS = 20, 256


def processor_seconds(prl, model, folder, rows, reduce, steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([prl, "sft", "--model.name", model, "--model.reduce", reduce, "--data.type", "fake", "--data.batch-size", str(rows),
                    "--data.micro-batch-size", "1", "--data.seq-len", str(ROW_TOKENS), "--data.length", "fixed", "--max-steps", str(steps),
                    "--compute.device", "cpu", "--compute.num-threads", "1", "--output-dir", str(folder), "--clean-output-dir"],
                   check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    prl = sys.argv[1] if len(sys.argv) > 1 else "build/release/bin/prl"
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        model = str(folder / "model")
        subprocess.run([prl, "init-model", model, "--hidden-size", "256", "--intermediate-size", "768", "--num-layers", "4"], check=True,
                       capture_output=True)
        for rows in (1, 2, 4, 8):
            seconds = {"exact": [], "fast": []}
            for repeat in range(repeats):
                for reduce in ("exact", "fast") if repeat % 2 == 0 else ("fast", "exact"):
                    start = processor_seconds(prl, model, folder / "run", 1, reduce, 1)
                    whole = processor_seconds(prl, model, folder / "run", rows, reduce, STEPS)
                    seconds[reduce].append((whole - start) / (STEPS - 1 / rows))
            middle = {name: statistics.median(runs) for name, runs in seconds.items()}
            told = ", ".join(f"{name} {1000 * middle[name]:.1f} ms ({1000 * min(runs):.1f} to {1000 * max(runs):.1f})"
                             for name, runs in seconds.items())
            print(f"{rows} rows: {told}, ratio {middle['exact'] / middle['fast']:.3f}", flush=True)


if __name__ == "__main__":
    main()
