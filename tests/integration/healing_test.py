#!/usr/bin/env python3
"""Engines and the orchestrator killed, stopped and paused at random moments of a lock-step run: the final weights and what was trained on
are those of a run that nobody disturbed. PRL_HEALING_MOMENTS=50 tries so many moments of each role, PRL_TEST_SEED repeats one choice of
them; what came of each moment and the time to recover are printed."""
import json
import os
import random
import re
import signal
import statistics
import time

import harness
from harness import check, prl

STEPS = 40
ASKED = int(os.environ.get("PRL_HEALING_MOMENTS", 0))
SEED = int(os.environ.get("PRL_TEST_SEED", time.time_ns() % 100000))
WAYS = ("kill", "stop", "pause")
LONGEST_WAIT = 1.5  # seconds from one moment to the next: some ten steps
STOPPED_SECONDS = 1  # after which the launcher replaces a role that is stopped
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def weights(out):
    return harness.tensor_digest(out / f"weights/step_{STEPS}")


def played(out):
    """What was trained on, per step, with everything that a rollout lost or played twice would change."""
    rows = {}
    for step in range(1, STEPS + 1):
        lines = (out / f"rollouts/step_{step}/train_rollouts.jsonl").read_text().splitlines()
        rows[step] = [(row["task"], row["example_id"], json.dumps(row["completion"]), row["reward"], row["advantage"])
                      for row in map(json.loads, lines)]
    return rows


def step_of(out):
    return max((row["step"] for row in harness.rows_of(out / "metrics.jsonl") if row["role"] == "trainer"), default=0)


class Disturbed:
    """One run, some of whose moments are disturbed."""

    def __init__(self, out, log, run, role):
        self.out, self.log, self.run, self.role = out, log, run, role
        self.found = []  # (way, seconds until a step was trained that was sampled after it, or the run ended, whether the role was started again)

    def is_over(self):
        return self.run.poll() is not None or step_of(self.out) >= STEPS

    def num_starts(self):
        return self.log.read_text().count(f"started {self.role} (pid")

    def wait_until_ready(self):
        """An engine that has never served is not started again, nor is an orchestrator before it has begun."""
        log = self.out / f"logs/latest/{self.role}.log"
        harness.wait_until(lambda: self.run.poll() is not None or (log.exists() and ("serving" in log.read_text() or self.role == "orchestrator")),
                           120, f"{self.role} to be ready", step=0.01)

    def disturb(self, way, draw):
        time.sleep(draw.random() * LONGEST_WAIT)
        pause = draw.random() * 2 * STOPPED_SECONDS
        if self.is_over():
            return
        pid, starts, began = harness.role_pids(self.log)[self.role], self.num_starts(), time.monotonic()
        # One more than was trained may have been sampled before.
        recovered = min(STEPS, step_of(self.out) + 2)
        try:
            os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
            if way == "pause":
                time.sleep(pause)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            # Of a pause that was too long. One that had ended before is no moment.
            if way != "pause" or time.monotonic() - began < pause:
                return
        if way != "pause":
            harness.wait_until(lambda: self.num_starts() > starts or self.is_over(), 60, f"{self.role} to be started again after {way}", step=0.01)
        harness.wait_until(lambda: step_of(self.out) >= recovered or self.is_over(), 120, f"a step after {way} of {self.role}", step=0.01)
        self.found.append((way, time.monotonic() - began, self.num_starts() > starts))


def variant(draw, role):
    """How the roles reach each other, drawn anew for each run, and the role that is disturbed."""
    engines = draw.choice((1, 2))
    ports = harness.free_ports(3)  # each has the next one beside it
    flags = ["--inference.parallel.dp", engines, "--inference.server.port", ports[0]]
    words = [f"{engines} engine{'s'[:engines - 1]}"]
    if draw.random() < 0.5:
        flags += ["--rollout-transport.type", "zmq", "--rollout-transport.port", ports[1]]
        words.append("zmq")
    if draw.random() < 0.5:
        flags += ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[2]]
        words.append("weights from memory")
    if role == "engine":
        role = draw.choice(("inference", "inference_1")[:engines])
    return role, flags, ", ".join(words)


def one_run(folder, name, config, role, ways, draw, may_start):
    """Disturbs one run `len(ways)` times; compares it with the calm one; the moments that hit it."""
    role, flags, words = variant(draw, role)
    out, log = folder / name, folder / f"{name}.log"
    command = ["rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--no-dashboard",
               "--deployment.max-stopped-seconds", STOPPED_SECONDS, "--deployment.max-engine-restarts", 20,
               "--deployment.max-orchestrator-restarts", 20, *flags]
    with harness.running(*command, log=log) as run:
        disturbed = Disturbed(out, log, run, role)
        disturbed.wait_until_ready()
        if not may_start or draw.random() < 0.7:  # else while the roles start
            harness.wait_until(lambda: step_of(out) > 0 or disturbed.is_over(), 120, "the first step", step=0.01)
        for way in ways:
            disturbed.disturb(way, draw)
        check(run.wait(540) == 0, f"{role} ({words}): {disturbed.found}: the run failed: {log.read_text()[-4000:]}")
    told = f"{role} ({words}): {', '.join(f'{way} {seconds:.1f} s' for way, seconds, _ in disturbed.found)}"
    check(weights(out) == weights(folder / "calm"), f"{told}: other weights")
    check(played(out) == played(folder / "calm"), f"{told}: other rollouts were trained on")
    rows = harness.check_rows(out)
    check(rows["orchestrator"] == rows["trainer"] == STEPS, f"{told}: rows {rows}")
    text = log.read_text()
    for way, what in (("stop", "it was stopped for"), ("kill", rf"{role} was killed by signal 9")):
        is_due = any(each == way and was_replaced for each, _, was_replaced in disturbed.found)
        check(not is_due or re.search(what, text), f"{told}: {what!r} was not told: {text[-3000:]}")
    print(f"  {told}", flush=True)
    return disturbed.found


def disturb(role):
    print(f"seed {SEED}", flush=True)
    draw = random.Random(f"{SEED} {role}")
    with harness.workspace(f"healing-{role}") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "calm", "--ckpt")
        found, number = [], 0
        while len(found) < max(ASKED, 1):
            # The waits before restarts double, so a run gets three moments at most.
            ways = [WAYS[(len(found) + i) % len(WAYS)] for i in range(min(3, ASKED - len(found)))] if ASKED else ["kill", "stop"]
            name = f"run{number}"
            draw.shuffle(ways)
            found += one_run(folder, name, config, role, ways, draw, may_start=ASKED > 0)
            number += 1
            check(number < 10 + 3 * ASKED, "runs end before they are disturbed")
        for way in WAYS:
            seconds = [each for kind, each, _ in found if kind == way]
            if seconds:
                print(f"  {role}, {way}: {len(seconds)} moments, to a step that was sampled after it: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s",
                      flush=True)


def test_an_engine_disturbed_at_any_moment_changes_nothing():
    disturb("engine")


def test_an_orchestrator_disturbed_at_any_moment_changes_nothing():
    disturb("orchestrator")


if __name__ == "__main__":
    harness.main(test_an_engine_disturbed_at_any_moment_changes_nothing, test_an_orchestrator_disturbed_at_any_moment_changes_nothing)
