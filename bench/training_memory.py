#!/usr/bin/env python3
"""What each option of docs/training-memory.md costs and saves: `prl trainer --bench` once per option, on random weights.

usage: training_memory.py PRL MODEL_FOLDER [SHAPE [SEQ_LEN [extra options of prl trainer ...]]]
The folder is made when it is missing, of a SHAPE of models.py (qwen3-0.6b). Prints tokens per second of whole steps, the optimizer
included, seconds of a step, and peak memory, rate and peak also as a share of the run that keeps everything on the device in float32.
The last loss must be alike in all runs of float32 state.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

from models import ensure_model

SELECTIVE = ["--model.ac.mode", "selective", "--model.ac.targets"]
RUNS = [
    ("everything kept", []),
    ("ac selective: norm", [*SELECTIVE, "norm"]),
    ("ac selective: norm, attn_proj", [*SELECTIVE, "norm,attn_proj"]),
    ("ac selective: norm, mlp", [*SELECTIVE, "norm,mlp"]),
    ("ac selective: all three", [*SELECTIVE, "norm,attn_proj,mlp"]),
    ("ac full", ["--model.ac"]),
    ("ac full, ac_offloading", ["--model.ac-offloading"]),
    ("ac selective: all three, ac_offloading", [*SELECTIVE, "norm,attn_proj,mlp", "--model.ac-offloading"]),
    ("optim_cpu_offload", ["--model.optim-cpu-offload"]),
    ("optimization_dtype bfloat16", ["--model.optimization-dtype", "bfloat16"]),
    ("bfloat16 state, offloaded", ["--model.optimization-dtype", "bfloat16", "--model.optim-cpu-offload"]),
]


def measure(prl, model, seq_len, options, extra):
    with tempfile.TemporaryDirectory() as folder:
        table = pathlib.Path(folder) / "table.json"
        done = subprocess.run(
            [prl, "trainer", "--model.name", model, "--model.seq-len", str(seq_len), "--data.fake.batch-size", "1",
             "--bench.output-json", str(table), "--output-dir", folder, *options, *extra], capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(options)}: {log[-3000:]}")
        losses = [line.split("Loss: ")[1].split()[0] for line in log.splitlines() if "Loss: " in line]
        plan = next((line.split("memory plan: ")[1] for line in log.splitlines() if "memory plan: " in line), "")
        overall = json.loads(table.read_text())["overall"]
        # perf/throughput leaves the optimizer out, which is what some of these options slow down.
        seconds = overall["step_time"]["mean"]
        return seq_len / seconds, seconds, overall["peak_memory"]["gib"], losses[-1] if losses else "?", plan


def main():
    prl, model = sys.argv[1], sys.argv[2]
    shape = sys.argv[3] if len(sys.argv) > 3 else "qwen3-0.6b"
    seq_len = int(sys.argv[4]) if len(sys.argv) > 4 else 16384
    ensure_model(prl, model, shape)
    first = None
    print("| option | tokens/s | of the first | seconds a step | peak GiB | of the first | last loss |\n|---|---|---|---|---|---|---|")
    for name, options in RUNS:
        rate, seconds, peak, loss, plan = measure(prl, model, seq_len, options, sys.argv[5:])
        first = first or (rate, peak)
        print(f"| {name} | {rate:,.0f} | {rate / first[0]:.2f} | {seconds:.3f} | {peak:.2f} | {peak / first[1]:.2f} | {loss} |", flush=True)
        print(f"  plan: {plan}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
