#!/usr/bin/env python3
"""What the sum of leaves costs on one rank: steps of 1, 2, 4, 8 rows with model.reduce = "exact" and "fast", in turns.

usage: bench/leaf_sum.py [PRL] [--device cpu|cuda] [--repeats N]

On the CPU a model of 3.4 million parameters, rows of 256 tokens, one thread: processor time per step, which other tenants of a machine change
less than they change the time that passes, what a run of no steps takes being left out. On a GPU the shape of Qwen3-0.6B with rows of
2,048 tokens: the median of a run's steps but the first. Prints the median of the repeats (least to greatest) and the ratio."""
import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import tempfile

STEPS = 20
SHAPES = {
    "cpu": (256, ("--hidden-size", "256", "--intermediate-size", "768", "--num-layers", "4")),
    "cuda": (2048, ("--vocab-size", "151936", "--hidden-size", "1024", "--intermediate-size", "3072", "--num-layers", "28", "--num-heads", "16",
                    "--num-kv-heads", "8", "--head-dim", "128", "--max-position-embeddings", "40960", "--dtype", "bfloat16")),
}


def run(args, model, folder, rows, reduce, steps):
    subprocess.run([args.prl, "sft", "--model.name", model, "--model.reduce", reduce, "--data.type", "fake", "--data.batch-size", str(rows),
                    "--data.micro-batch-size", "1", "--data.seq-len", str(SHAPES[args.device][0]), "--data.length", "fixed", "--max-steps",
                    str(steps), "--compute.device", args.device, *(["--compute.num-threads", "1"] if args.device == "cpu" else []),
                    "--output-dir", str(folder), "--clean-output-dir"], check=True, capture_output=True)


def processor_seconds(args, model, folder, rows, reduce, steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(args, model, folder, rows, reduce, steps)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step_seconds(args, model, folder, rows, reduce):
    """Of one step."""
    if args.device == "cpu":
        start = processor_seconds(args, model, folder, 1, reduce, 1)
        return (processor_seconds(args, model, folder, rows, reduce, STEPS) - start) / (STEPS - 1 / rows)
    run(args, model, folder, rows, reduce, STEPS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["time/step"] for line in lines if "time/step" in line][1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prl", nargs="?", default="build/release/bin/prl")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        model = str(folder / "model")
        subprocess.run([args.prl, "init-model", model, *SHAPES[args.device][1]], check=True, capture_output=True)
        for rows in (1, 2, 4, 8):
            seconds = {"exact": [], "fast": []}
            for repeat in range(args.repeats):
                for reduce in ("exact", "fast") if repeat % 2 == 0 else ("fast", "exact"):
                    seconds[reduce].append(step_seconds(args, model, folder / "run", rows, reduce))
            middle = {name: statistics.median(runs) for name, runs in seconds.items()}
            told = ", ".join(f"{name} {1000 * middle[name]:.1f} ms ({1000 * min(runs):.1f} to {1000 * max(runs):.1f})"
                             for name, runs in seconds.items())
            print(f"{rows} rows: {told}, ratio {middle['exact'] / middle['fast']:.3f}", flush=True)


if __name__ == "__main__":
    main()
