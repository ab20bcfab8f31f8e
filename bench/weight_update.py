#!/usr/bin/env python3
"""`prl rl` on several GPUs of the machine with random weights, as a Markdown table: how long new weights take from trainers to engines, and what each role waits for.

    python3 bench/weight_update.py [--prl build/release/bin/prl[,OTHER]] [--shape qwen3-0.6b] [--trainers 1] [--engines 1] [--types filesystem,host,nccl] [--kill ROLE]
                                   [-- OPTIONS OF prl rl]

The first GPUs train, each engine has one of the others. All rollouts of random weights have the same reward, so advantages are 0 and are trained on all the same. Times are
medians (least to greatest) of the steps but the first four: `publish` is the trainer's checksum, probe and publication, `update` the orchestrator's from its word
to the engines until each has proved the new version; tokens/s are those trained on. The type `host` is nccl without links between GPUs: through host memory, over TCP.
With several binaries each type runs with each of them, in turns. With --kill a process (trainer_rank_1, inference) gets a SIGKILL after the steps that warm up: the run heals, and
what is printed is how long the step took in which it died, beside the others' median.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

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


def rows_of(out):
    """Whole lines of the run's metrics so far."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def kill_after(process, out, log, role, step, timeout):
    """Sends SIGKILL to a role of the run once that step has ended."""
    end = time.monotonic() + timeout
    while not any(row.get("step", 0) >= step for row in rows_of(out)):
        if process.poll() is not None or time.monotonic() > end:
            return
        time.sleep(0.02)
    pids = dict(re.findall(r"started (\w+) \(pid (\d+)\)", log.read_text(errors="replace")))
    os.kill(int(pids[role]), signal.SIGKILL)


def stop(process):
    """The run with all its roles: they are one process group."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def run(options, prl, model, kind, out):
    # Engines take consecutive ports from the first.
    first, weights = free_ports(2)
    words = [prl, "rl", "--model.name", model, "--max-steps", options.steps + WARM_UP, "--seq-len", 512, "--output-dir", out, "--no-dashboard",
             "--orchestrator.batch-size", 128, "--orchestrator.group-size", 8, "--orchestrator.train.sampling.max-completion-tokens", 64,
             "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", '{"mode": "tiny"}',
             "--orchestrator.train.filter-zero-advantages", "false", "--inference.max-num-seqs", 128, "--inference.model.max-model-len", 512,
             "--deployment.type", "single_node", "--trainer-gpu-ids", json.dumps(list(range(options.trainers))),
             "--inference-gpu-ids", json.dumps(list(range(options.trainers, options.trainers + options.engines))),
             "--deployment.num-train-gpus", options.trainers, "--deployment.num-infer-gpus", options.engines, "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda",
             "--inference.server.port", first, "--weight-broadcast.type", "filesystem" if kind == "filesystem" else "nccl", *options.flags]
    if kind != "filesystem":
        words += ["--weight-broadcast.port", weights]
    environment = {**os.environ, "PRL_WEIGHT_LINKS": "0" if kind == "host" else "1"}
    if options.kill:
        words.append("--trainer.healing")
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    with open(log, "wb") as stream, subprocess.Popen(list(map(str, words)), stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True) as process:
        try:
            if options.kill:
                kill_after(process, out, log, options.kill, WARM_UP + 3, options.timeout)
            process.wait(options.timeout)
        except BaseException:
            stop(process)
            raise
    logs = "".join(path.read_text(errors="replace") for path in sorted((out / "logs").rglob("*.log")))
    if process.returncode:
        return {"error": log.read_text(errors="replace").strip().splitlines()[-6:]}
    found = {"step": [], "publish": [], "train": [], "wait": [], "update": [], "collect": [], "mismatch": [], "rate": [], "recovered": []}
    for row in rows_of(out):
        if row.get("step", 0) <= WARM_UP:
            continue
        for name, key in (("publish", "time/broadcast_weights"), ("train", "time/forward_backward"), ("wait", "time/wait_for_batch"),
                          ("rate", "perf/throughput"), ("collect", "time/generate_completions"), ("update", "time/update_weights"), ("mismatch", "mismatch_kl/all/max")):
            if key in row:
                found[name].append(row[key])
        if row.get("healing/recover_seconds"):
            found["recovered"].append(row["healing/recover_seconds"])
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
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--kill", help="role that gets a SIGKILL, by the name in the log: trainer_rank_1, inference")
    parser.add_argument("--types", default="filesystem,host,nccl")
    parser.add_argument("--steps", type=int, default=16, help="after four to warm up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument("--keep", help="folder for the runs' logs (default: a temporary one)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.flags = words[end + 1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="prl-weights-") as scratch:
        binaries = [os.path.abspath(prl) for prl in options.prl.split(",")]
        model = models.ensure_model(binaries[-1], os.path.abspath(options.model or scratch + "/model"), options.shape)
        print(f"{options.shape}, {options.trainers} GPUs train, {options.engines} sample {' '.join(options.flags)}\n")
        print("| binary | type | step (s) | publish (s) | update (s) | forward, backward (s) | trainer waits (s) | rollouts (s) | tokens/s | mismatch_kl, max |\n"
              "|---|---|---|---|---|---|---|---|---|---|", flush=True)
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
                      f"{spread(found['wait'])} | {spread(found['collect'])} | {spread(found['rate'], 0)} | {max(found['mismatch'], default=float('nan')):.1e} |", flush=True)
                if found["recovered"]:
                    print(f"<!-- trained on {found['recovered']} s after the loss was noticed -->", flush=True)
                for line in found["memory"] + found["transfers"]:
                    print(f"<!-- {line} -->", flush=True)


if __name__ == "__main__":
    main()
