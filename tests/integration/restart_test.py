#!/usr/bin/env python3
"""Roles of `prl rl` that are killed and started again: an orchestrator goes on where it was, a trainer brings all roles back to its last
checkpoint, and the final weights are those of a run that nobody disturbed."""
import json
import os
import random
import re
import signal
import statistics
import time

import harness
from harness import check, prl

STEPS = 12
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def lock_step(folder, **top):
    return harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS, **top)


def single_node(config, out, *flags):
    ports = harness.free_ports(2)
    return ["rl", "@", config, "--output-dir", out, "--deployment.type", "single_node", "--inference.server.port", ports[0],
            *[ports[1] if word == "PORT" else word for word in flags]]


def weights(out):
    return harness.tensor_digest(out / f"weights/step_{STEPS}")


def played(out):
    """What was trained on, per step."""
    rows = {}
    for step in range(1, STEPS + 1):
        lines = (out / f"rollouts/step_{step}/train_rollouts.jsonl").read_text().splitlines()
        rows[step] = [(row["task"], row["example_id"], json.dumps(row["completion"]), row["reward"], row["advantage"])
                      for row in map(json.loads, lines)]
    return rows


def last_row(out, role):
    return max((row["step"] for row in harness.rows_of(out / "metrics.jsonl") if row["role"] == role), default=0)


def seconds_per_step(out):
    return statistics.median(row["time/step"] for row in harness.rows_of(out / "metrics.jsonl") if row["role"] == "orchestrator" and row["step"] > 1)


def kill_at(run, log, out, role, steps, draw, seconds):
    """Kills `role` somewhere in each of these steps, which take about `seconds`."""
    for step in steps:
        harness.wait_until(lambda: last_row(out, "orchestrator") >= step and role in harness.role_pids(log) or run.poll() is not None, 120,
                           f"step {step}", step=0.01)
        check(role in harness.role_pids(log), f"the run ended before {role} was started: {log.read_text()[-3000:]}")
        time.sleep(draw.random() * seconds)
        pid = harness.role_pids(log)[role]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            check(run.poll() is not None or last_row(out, "orchestrator") >= STEPS, f"{role} had ended already")
            return
        count = len(re.findall(rf"started {role} \(pid", log.read_text()))
        harness.wait_until(lambda: len(re.findall(rf"started {role} \(pid", log.read_text())) > count or run.poll() is not None, 60,
                           f"{role} to be started again")


def test_a_killed_orchestrator_goes_on_where_it_was():
    seed = int(os.environ.get("PRL_TEST_SEED", time.time_ns() % 100000))
    print(f"seed {seed}")
    draw = random.Random(seed)
    with harness.workspace("orchestrator-restart") as folder:
        config = lock_step(folder)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        seconds = seconds_per_step(folder / "one")
        for transport in ("filesystem", "zmq"):
            out, log = folder / transport, folder / f"{transport}.log"
            flags = ["--ckpt", "--rollout-transport.type", transport]
            if transport == "zmq":
                flags += ["--rollout-transport.port", "PORT"]
            with harness.running(*single_node(config, out, *flags), log=log) as run:
                steps = [draw.randrange(4), *sorted(draw.sample(range(4, STEPS), 2))]  # the first one surely before the run ends
                kill_at(run, log, out, "orchestrator", steps, draw, seconds)
                check(run.wait(540) == 0, log.read_text()[-4000:])
            check(weights(out) == weights(folder / "one"), f"{transport}: other weights")
            check(played(out) == played(folder / "one"), f"{transport}: other rollouts were trained on")
            rows = harness.check_rows(out)
            check(rows["orchestrator"] == rows["trainer"] == STEPS, f"{transport}: rows {rows}")
            last = [row for row in harness.rows_of(out / "metrics.jsonl") if row["role"] == "orchestrator"][-1]
            check(last["healing/orchestrator_restarts"] >= 1, f"restarts are not counted: {last}")
            check(not (out / "recovery").exists(), "the state for a restart is left behind")


def test_an_orchestrator_that_keeps_dying_ends_the_run():
    with harness.workspace("orchestrator-limit") as folder:
        out, log = folder / "out", folder / "run.log"
        with harness.running(*single_node(lock_step(folder), out, "--deployment.max-orchestrator-restarts", 0), log=log) as run:
            harness.wait_until(lambda: last_row(out, "orchestrator") >= 1 or run.poll() is not None, 120, "a step")
            os.kill(harness.role_pids(log)["orchestrator"], signal.SIGKILL)
            check(run.wait(180) == 1, "the run went on")
        check("orchestrator was killed by signal 9" in log.read_text(), log.read_text()[-3000:])
        check(not (out / "recovery").exists(), "a state is kept that nobody needs")


def test_a_killed_trainer_takes_all_roles_back_to_its_checkpoint():
    with harness.workspace("trainer-restart") as folder:
        config = lock_step(folder)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        for name, flags in (("saved", ["--ckpt.interval", 4]), ("unsaved", ["--ckpt"])):
            out, log = folder / name, folder / f"{name}.log"
            with harness.running(*single_node(config, out, *flags, "--deployment.max-trainer-restarts", 1), log=log) as run:
                harness.wait_until(lambda: last_row(out, "trainer") >= 5 or run.poll() is not None, 120, "step 5", step=0.01)
                os.kill(harness.role_pids(log)["trainer"], signal.SIGKILL)
                check(run.wait(540) == 0, log.read_text()[-4000:])
            text = log.read_text()
            check("the trainer was killed: all roles begin again in 0.5 s (1 of 1 restarts)" in text, text[-3000:])
            check(("resuming after step 4" if name == "saved" else "the run starts from scratch") in text, text[-3000:])
            check(weights(out) == weights(folder / "one"), f"{name}: other weights")
            rows = harness.check_rows(out)
            check(rows["orchestrator"] == rows["trainer"] == STEPS, f"{name}: rows {rows}")


if __name__ == "__main__":
    harness.main(test_a_killed_orchestrator_goes_on_where_it_was, test_an_orchestrator_that_keeps_dying_ends_the_run,
                 test_a_killed_trainer_takes_all_roles_back_to_its_checkpoint)
