#!/usr/bin/env python3
"""Asynchronous runs with a role that gets a fraction of its time: rollouts are never staler than the configuration allows."""
import json

import harness
from harness import check

STEPS = 8


def slow_run(folder, slow_role, max_async_level, max_off_policy_steps, transport):
    """One run over processes with `slow_role` slowed down; returns its metrics and its rollouts by step."""
    out, log = folder / "out", folder / "rl.log"
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=STEPS, max_async_level=max_async_level)
    ports = ["--inference.server.port", harness.free_port()]
    if transport == "zmq":
        ports += ["--rollout-transport.type", "zmq", "--rollout-transport.port", harness.free_port()]
    with harness.running("rl", "@", config, "--output-dir", out, "--deployment.type", "single_node", *ports,
                         "--orchestrator.max-off-policy-steps", max_off_policy_steps, "--orchestrator.oversampling-factor", 2,
                         log=log) as process:
        harness.wait_until(lambda: (out / "rollouts/step_1").exists() or process.poll() is not None, 60, "the first batch")
        with harness.slowed(harness.role_pids(log)[slow_role]):
            status = process.wait(360)
        check(status == 0, f"exit status {status}: {log.read_text()[-3000:]}")
    return harness.metrics(out)


def check_bounds(rows, max_async_level, max_age):
    check(set(range(1, STEPS + 1)) <= set(rows), f"steps {sorted(rows)}, wanted 1 to {STEPS}")
    lags = [rows[step]["scheduler/async_level"] for step in range(1, STEPS + 1)]
    ages = [rows[step]["off_policy_level/all/max"] for step in range(1, STEPS + 1)]
    removed = sum(rows[step]["scheduler/cancelled_rollouts"] + rows[step]["scheduler/dropped_rollouts"] for step in range(1, STEPS + 1))
    print(f"      async levels {json.dumps(lags)}, largest ages {json.dumps(ages)}, {removed:.0f} rollouts removed")
    check(max(lags) <= max_async_level, f"a batch was sampled {max(lags)} steps ahead, allowed are {max_async_level}")
    check(max(ages) <= max_age, f"a rollout was {max(ages)} versions old, allowed are {max_age}")
    return max(lags), max(ages)


def test_a_slow_trainer_is_never_overtaken_by_more_than_the_async_level():
    for level in (1, 2):
        with harness.workspace("slow-trainer") as folder:
            lag, _ = check_bounds(slow_run(folder, "trainer", level, 8, "filesystem"), level, level)
            check(lag == level, f"the orchestrator was at most {lag} steps ahead of a slow trainer: the limit {level} was not tested")


def test_a_slow_engine_yields_no_rollout_beyond_the_off_policy_limit():
    for _ in range(3):  # whether a rollout reaches the limit is a matter of timing; that none goes beyond it is not
        with harness.workspace("slow-engine") as folder:
            _, age = check_bounds(slow_run(folder, "inference", 2, 1, "zmq"), 1, 1)
        if age == 1:
            return
    raise harness.Failure("no rollout reached the limit: it was not tested")


def test_a_strict_level_is_exact():
    """Newer weights are there, and wait for their batch: in one process, where they are kept, and over processes, where their folders are."""
    for deployment in ((), ("--deployment.type", "single_node", "--inference.server.port", harness.free_port())):
        with harness.workspace("strict") as folder:
            config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=STEPS, max_async_level=2)
            harness.prl("rl", "@", config, "--output-dir", folder / "out", "--orchestrator.strict-async-level", *deployment)
            rows = harness.metrics(folder / "out")
            for scope in ("max", "min"):
                ages = [rows[step][f"off_policy_level/all/{scope}"] for step in range(1, STEPS + 1)]
                check(ages == [0, 1] + [2] * (STEPS - 2), f"{deployment}: {scope} {ages}")


harness.main(test_a_strict_level_is_exact,
             test_a_slow_trainer_is_never_overtaken_by_more_than_the_async_level,
             test_a_slow_engine_yields_no_rollout_beyond_the_off_policy_limit)
