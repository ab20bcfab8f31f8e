#!/usr/bin/env python3
"""How long new weights take from the trainer's GPU to engines on other GPUs of the machine, as a Markdown table: `prl rl` on random weights.

    python3 bench/weight_update.py [--prl build/release/bin/prl[,OTHER]] [--shape qwen3-0.6b] [--engines 1] [--types filesystem,host,nccl] [-- OPTIONS OF prl rl]

GPU 0 trains, each engine has one of the others. All rollouts of random weights have the same reward, so advantages are 0 and are trained on all the same. Times are
medians (least to greatest) of the steps but the first four: `publish` is the trainer's checksum, probe and publication, `update` the orchestrator's from its word
to the engines until each has proved the new version. The type `host` is nccl without links between GPUs: through host memory, over TCP.
With several binaries each type runs with each of them, in turns.
"""
import argparse
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import models  # noqa: E402

WARM_UP = 4


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def run(options, prl, model, kind, out):
    # Engines take consecutive ports from the first.
    first, weights = free_ports(2)
    words = [prl, "rl", "--model.name", model, "--max-steps", options.steps + WARM_UP, "--seq-len", 512, "--output-dir", out, "--no-dashboard",
             "--orchestrator.batch-size", 128, "--orchestrator.group-size", 8, "--orchestrator.train.sampling.max-completion-tokens", 64,
             "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", '{"mode": "tiny"}',
             "--orchestrator.train.filter-zero-advantages", "false", "--inference.max-num-seqs", 128, "--inference.model.max-model-len", 512,
             "--deployment.type", "single_node", "--trainer-gpu-ids", "[0]", "--inference-gpu-ids", json.dumps(list(range(1, options.engines + 1))),
             "--deployment.num-infer-gpus", options.engines, "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda",
             "--inference.server.port", first, "--weight-broadcast.type", "filesystem" if kind == "filesystem" else "nccl", *options.flags]
    if kind != "filesystem":
        words += ["--weight-broadcast.port", weights]
    environment = {**os.environ, "PRL_WEIGHT_LINKS": "0" if kind == "host" else "1"}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=options.timeout, env=environment)
    logs = "".join(path.read_text(errors="replace") for path in sorted((out / "logs").rglob("*.log")))
    if done.returncode:
        return {"error": (done.stderr + done.stdout).strip().splitlines()[-6:]}
    found = {"step": [], "publish": [], "train": [], "wait": [], "update": [], "mismatch": []}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("step", 0) <= WARM_UP:
            continue
        for name, key in (("publish", "time/broadcast_weights"), ("train", "time/forward_backward"), ("wait", "time/wait_for_batch"),
                          ("update", "time/update_weights"), ("mismatch", "mismatch_kl/all/max")):
            if key in row:
                found[name].append(row[key])
        if "time/broadcast_weights" in row and "time/step" in row:
            found["step"].append(row["time/step"])
    found["memory"] = re.findall(r"memory: [^\n]*", logs)
    found["transfers"] = re.findall(r"policy v\d+: met [^\n]*", logs)[-2:]
    return found


def spread(values, digits=3):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})" if values else "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prl", default="build/release/bin/prl", help="one binary, or several between commas")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(models.SHAPES))
    parser.add_argument("--model", help="folder of the model, made when it is missing (default: in a temporary one)")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--types", default="filesystem,host,nccl")
    parser.add_argument("--steps", type=int, default=16, help="after four to warm up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument("--keep", help="folder for the runs' logs (default: a temporary one)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.flags = words[end + 1:]
    with tempfile.TemporaryDirectory(prefix="prl-weights-") as scratch:
        binaries = [os.path.abspath(prl) for prl in options.prl.split(",")]
        model = models.ensure_model(binaries[-1], os.path.abspath(options.model or scratch + "/model"), options.shape)
        print(f"{options.shape}, one GPU trains, {options.engines} sample {' '.join(options.flags)}\n")
        print("| binary | type | step (s) | publish (s) | update (s) | forward, backward (s) | trainer waits (s) | mismatch_kl, max |\n|---|---|---|---|---|---|---|---|",
              flush=True)
        for kind in options.types.split(","):
            for number, prl in enumerate(binaries):
                out = pathlib.Path(options.keep or scratch) / f"{kind}-{number}"
                try:
                    found = run(options, prl, model, kind, out)
                except subprocess.TimeoutExpired:
                    found = {"error": [f"not done after {options.timeout:.0f} s"]}
                if "error" in found:
                    print(f"| {number} | {kind} | {' / '.join(found['error'])} |", flush=True)
                    continue
                print(f"| {number} | {kind} | {spread(found['step'])} | {spread(found['publish'])} | {spread(found['update'])} | {spread(found['train'])} | "
                      f"{spread(found['wait'])} | {max(found['mismatch'], default=float('nan')):.1e} |", flush=True)
                for line in found["memory"] + found["transfers"]:
                    print(f"<!-- {line} -->", flush=True)


if __name__ == "__main__":
    main()
