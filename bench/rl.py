#!/usr/bin/env python3
"""A step of `prl rl` where trainer and sampler work all the time: reverse-text with random weights, sampler one step behind at most. The
reward is the length of the reply, since random weights earn none by the task and nothing would be trained. Steps are counted from the third on, and
up to those for which the sampler has nothing left to do. Prints one JSON object: medians, and the range of step_s.

usage: rl.py PRL MODEL_FOLDER SHAPE [--steps N] [OPTIONS OF prl rl]; the folder is made when it is missing, of a SHAPE of models.py.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from models import ensure_model

OPTIONS = ["--seq-len", "2048", "--max-async-level", "1", "--orchestrator.batch-size", "128", "--orchestrator.group-size", "8", "--inference.max-num-seqs", "128",
           "--orchestrator.train.sampling.max-completion-tokens", "128", "--orchestrator.train.sampling.min-tokens", "128",
           "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", '{"mode": "tiny"}',
           "--orchestrator.train.env.0.reward.import-path", "bench_reward.length", "--no-dashboard"]
REWARD = """
def length(rollouts):
    return [len(rollout["completion"][-1]["content"]) / 100 for rollout in rollouts]
"""
WARM_UP, AT_END = 2, 2


def summary(rows, num_steps):
    trained = {row["step"]: row for row in rows if row["role"] == "trainer"}
    collected = {row["step"]: row for row in rows if row["role"] == "orchestrator"}
    steps = range(WARM_UP + 1, num_steps - AT_END + 1)
    step_s = [trained[step]["time"] - trained[step - 1]["time"] for step in steps]

    def median(of, key):
        return round(statistics.median(of[step][key] for step in steps), 4)
    return {"steps": len(step_s), "step_s": round(statistics.median(step_s), 3), "step_s_range": [round(min(step_s), 3), round(max(step_s), 3)],
            "forward_backward_s": median(trained, "time/forward_backward"), "trainer_waits_s": median(trained, "time/wait_for_batch"),
            "collects_s": median(collected, "time/generate_completions"), "tokens_per_s": median(trained, "perf/throughput"),
            "mismatch_kl": max(trained[step]["mismatch_kl/all/mean"] for step in steps)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prl")
    parser.add_argument("model")
    parser.add_argument("shape")
    parser.add_argument("--steps", type=int, default=8, help=f"of which {WARM_UP} warm up and {AT_END} end the run")
    options, of_prl = parser.parse_known_args()
    if options.steps <= WARM_UP + AT_END:
        parser.error(f"--steps: at least {WARM_UP + AT_END + 1} are needed")
    model = os.path.abspath(options.model)
    ensure_model(options.prl, model, options.shape)
    with tempfile.TemporaryDirectory(prefix="prl-bench-rl-") as scratch:
        out = pathlib.Path(scratch) / "run"
        (pathlib.Path(scratch) / "bench_reward.py").write_text(REWARD)
        status = subprocess.run([options.prl, "rl", "--model.name", model, "--max-steps", str(options.steps), "--output-dir", out, *OPTIONS,
                                 "--orchestrator.train.env.0.reward.path", scratch, *of_prl]).returncode
        if status != 0:
            sys.exit(status)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(summary(rows, options.steps)))


if __name__ == "__main__":
    main()
