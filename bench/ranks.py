#!/usr/bin/env python3
"""Training on 1, 2, 4, 8 GPUs of one machine beside PyTorch's FSDP2: `prl sft` on random rows, as a Markdown table.

    python3 bench/ranks.py [--prl build/release/bin/prl] [--shape qwen3-0.6b] [--seq-len 8192] [--rows 2] [--ranks 1,2] [--reduce exact,fast] [--layers N] [--kill ROLE] [--peer] [--plan] [-- OPTIONS OF prl sft]

Each rank has `--rows` packed rows of `--seq-len` tokens a step whatever the number of ranks, so that all tokens/s over those of one rank times the number
of ranks is the efficiency. Times are medians (least to greatest) of the steps but the first two. bfloat16, fp32 masters, AdamW. The peer runs the same shape, rows and ranks in the same call
(bench/peer_fsdp.py: transformers, fully_shard of each layer, its parameters in fp32 and computed with in bfloat16). With --plan a second table holds what
`prl plan --card local` foretells beside what was measured; a run of one rank says what part of the peak training reaches.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import models  # noqa: E402
import weight_update  # noqa: E402

WARM_UP = 2


def ours(options, model, ranks, reduce, scratch):
    out = pathlib.Path(scratch) / f"{ranks}-{reduce}"
    words = ["sft", "--model.name", model, "--data.type", "fake", "--data.seq-len", options.seq_len, "--data.batch-size", options.rows * ranks,
             "--data.input-ids", "random", "--max-steps", options.steps + WARM_UP, "--deployment.num-gpus", ranks, "--model.reduce", reduce,
             "--compute.device", options.device, "--no-dashboard", "--output-dir", out, *options.flags]
    if options.kill:
        words.append("--healing")
    log = out.with_suffix(".log")
    with open(log, "wb") as stream, subprocess.Popen([options.prl, *map(str, words)], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            if options.kill and ranks > 1:
                weight_update.kill_after(process, out, log, options.kill, WARM_UP + 3, options.timeout)
            process.wait(options.timeout)
        except BaseException:
            weight_update.stop(process)
            raise
    if process.returncode:
        return {"error": log.read_text(errors="replace").strip().splitlines()[-4:]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row and row["step"] > WARM_UP]
    healed = [row["healing/recover_seconds"] for row in rows if row.get("healing/recover_seconds")]
    if options.kill:
        print(f"{ranks} ranks, {reduce}: a step of {statistics.median(row['time/step'] for row in rows):.3f} s; healed in {', '.join(map(str, healed)) or '-'} s, "
              f"the longest step {max(row['time/step'] for row in rows):.3f} s", file=sys.stderr)
    return {name: [row[key] for row in rows] for name, key in (
        ("step", "time/step"), ("pass", "time/forward_backward"), ("optimizer", "time/optimizer"), ("mfu", "perf/mfu"), ("peak", "perf/peak_memory"))}


def peer(options, ranks):
    words = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, HERE / "peer_fsdp.py", "--shape", options.shape,
             "--seq-len", options.seq_len, "--rows", options.rows, "--steps", options.steps, "--warm-up", WARM_UP]
    if options.peer_recomputes:
        words.append("--recompute")
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=options.timeout)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-4:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def foretold(options, model, ranks, efficiency):
    words = ["plan", model, "--num-devices", ranks, "--num-rows", options.rows * ranks, "--seq-len", options.seq_len, "--card", "local",
             "--assume-efficiency", efficiency, "--json"]
    done = subprocess.run([options.prl, *map(str, words)], capture_output=True, text=True, timeout=options.timeout)
    return json.loads(done.stdout) if done.returncode == 0 else sys.exit(f"prl plan: {done.stderr[-1000:]}")


def print_plan(options, model, found):
    exact = {row["ranks"]: row for row in found if row["work"] == "exact" and row.get("step")}
    if 1 not in exact:
        return print("no plan without a run of one rank")
    efficiency = min(1.0, foretold(options, model, 1, 1.0)["seconds"]["compute"] / statistics.median(exact[1]["pass"]))
    print(f"\nOne rank reaches {100 * efficiency:.0f}% of the peak measured.\n")
    print("| ranks | foretold: compute + exchange | measured | foretold: optimizer + gather | measured | error of the step |\n|---|---|---|---|---|---|")
    for ranks, row in exact.items():
        plan = foretold(options, model, ranks, efficiency)["seconds"]
        first, second, step = (statistics.median(row[key]) for key in ("pass", "optimizer", "step"))
        total = plan["compute"] + plan["exchange"] + plan["optimizer"] + plan["gather"]
        print(f"| {ranks} | {plan['compute']:.4f} + {plan['exchange']:.4f} s | {first:.4f} s | {plan['optimizer']:.4f} + {plan['gather']:.4f} s | {second:.4f} s | "
              f"{100 * (total / step - 1):+.0f}% |")


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prl", default="build/release/bin/prl")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(models.SHAPES))
    parser.add_argument("--model", help="folder of the model, made when it is missing (default: in a temporary one)")
    parser.add_argument("--layers", type=int, help="so many layers of the shape, with random weights that no file holds")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=2, help="of each rank and step")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--reduce", default="exact,fast")
    parser.add_argument("--steps", type=int, default=6, help="after two to warm up")
    parser.add_argument("--kill", help="role that gets a SIGKILL in the third step after warming up, by its name in the log (sft_rank_1): the run heals")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-recomputes", action="store_true", help="the peer computes layers again in the backward pass, where it does not fit otherwise")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--python", default="python3", help="of the peer")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run")
    parser.add_argument("--output-json")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.flags = words[end + 1:]
    options.prl = os.path.abspath(options.prl)
    found, first = [], {}
    with tempfile.TemporaryDirectory(prefix="prl-ranks-") as scratch:
        folder = os.path.abspath(options.model or scratch + "/model")
        if options.layers:
            model = models.ensure_config(options.prl, folder, options.shape, options.layers)
            options.flags += ["--model.debug.random-init"]
        else:
            model = models.ensure_model(options.prl, folder, options.shape)
        print(f"{options.shape}{f', {options.layers} layers' if options.layers else ''}, rows of {options.seq_len} tokens, {options.rows} for each rank and step {' '.join(options.flags)}\n")
        print("| work | ranks | tokens/s | efficiency | step (s) | forward, backward, exchange (s) | optimizer, gather (s) | MFU | peak (GiB) |\n|---|---|---|---|---|---|---|---|---|", flush=True)
        cases = [(name, int(ranks)) for name in options.reduce.split(",") for ranks in options.ranks.split(",")]
        cases += [("peer", int(ranks)) for ranks in options.ranks.split(",") if options.peer]
        for name, ranks in cases:
            try:
                times = peer(options, ranks) if name == "peer" else ours(options, model, ranks, name, scratch)
            except subprocess.TimeoutExpired:
                times = {"error": [f"not done after {options.timeout:.0f} s"]}
            found.append({"work": name, "ranks": ranks, **times})
            if "error" in times or not times["step"]:
                print(f"| {name} | {ranks} | {' / '.join(times.get('error', ['no steps']))} |", flush=True)
                continue
            rates = [options.rows * ranks * options.seq_len / seconds for seconds in times["step"]]
            first.setdefault(name, (ranks, statistics.median(rates)))
            efficiency = statistics.median(rates) / (first[name][1] * ranks / first[name][0])
            cell = lambda key, digits: spread(times[key], digits) if times.get(key) else ""  # noqa: E731
            print(f"| {name} | {ranks} | {spread(rates, 0)} | {100 * efficiency:.1f}% | {cell('step', 4)} | {cell('pass', 4)} | {cell('optimizer', 4)} | "
                  f"{cell('mfu', 1)} | {max(times['peak']):.1f} |", flush=True)
        if options.plan:
            print_plan(options, model, found)
    if options.output_json:
        pathlib.Path(options.output_json).write_text(json.dumps({"shape": options.shape, "seq_len": options.seq_len, "rows": options.rows, "found": found}, indent=1))


if __name__ == "__main__":
    main()
