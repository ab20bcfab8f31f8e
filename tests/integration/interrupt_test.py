#!/usr/bin/env python3
"""Ctrl-C: every long command stops within seconds, saves if it is told to, says so, and exits with 130 (a server with 0)."""
import json
import signal
import time

import harness
from harness import check, prl


def interrupt(arguments, log, is_ready, status=130, seconds=15):
    """Starts prl, sends SIGINT once `is_ready`, and returns what it printed."""
    with harness.running(*arguments, log=log) as process:
        harness.wait_until(lambda: is_ready() or process.poll() is not None, 60, f"{arguments[0]} to get going")
        check(process.poll() is None, f"{arguments[0]} ended early: {log.read_text()[-2000:]}")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        got = process.wait(180)
        took = time.monotonic() - began
    text = log.read_text()
    check(got == status, f"{arguments[0]}: exit status {got}, wanted {status}: {text[-3000:]}")
    check(took < seconds, f"{arguments[0]}: {took:.1f} s to stop")
    check("interrupted: stopping cleanly" in text, f"no word about the interruption: {text[-2000:]}")
    check("ERROR" not in text, f"a clean stop reports errors: {text[-3000:]}")
    return text


def last_step(out):
    return max((int(path.name[5:]) for path in (out / "checkpoints").iterdir()), default=0)


def check_rl(folder, name, *flags, **top):
    """Interrupts a run and resumes it; both roles must have stopped at one and the same step."""
    out, log = folder / name, folder / f"{name}.log"
    config = harness.rl_config(folder / f"{name}.toml", harness.warm_model(), **{"max_steps": 400, **top})
    arguments = ["rl", "@", config, "--output-dir", out, "--ckpt", *flags]
    text = interrupt(arguments, log, lambda: (out / "rollouts/step_3").exists())
    step = last_step(out)
    check(step >= 2, f"stopped after step {step}")
    for role in ("trainer", "orchestrator"):
        check((out / f"checkpoints/step_{step}/{role}/manifest.json").exists(), f"{name}: {role} did not save step {step}")
    check((out / f"weights/step_{step}/model.safetensors").exists(), f"{name}: no weights of step {step}")
    for role in ("trainer", "orchestrator", "inference"):
        role_log = (out / f"logs/latest/{role}.log").read_text()
        check("ERROR" not in role_log, f"{name}: the log of {role} has errors: {role_log[-2000:]}")
    _, stderr = prl(*arguments, "--ckpt.resume-step", -1, "--max-steps", step + 2)
    check(step + 2 in harness.metrics(out), f"{name}: no step {step + 2} after the resume: {stderr[-2000:]}")
    check(last_step(out) == step + 2, f"{name}: the resumed run did not save its last step")
    logged = stderr + (out / "logs/latest/trainer.log").read_text()
    check(f"checkpoints/step_{step}" in logged, f"{name}: it did not resume from step {step}: {logged[:2000]}")
    return text


def test_rl_in_one_process():
    with harness.workspace("rl") as folder:
        for level in (0, 1, 2):
            text = check_rl(folder, f"async{level}", max_async_level=level)
            check("rl stopped" in text and "--ckpt.resume-step -1" in text, f"no summary: {text[-1000:]}")


def test_rl_over_processes():
    with harness.workspace("rl-node") as folder:
        text = check_rl(folder, "files", "--deployment.type", "single_node", "--inference.server.port", harness.free_port())
        check("rl stopped" in text and "--ckpt.resume-step -1" in text, f"no summary: {text[-1000:]}")
        check_rl(folder, "zmq", "--deployment.type", "single_node", "--inference.server.port", harness.free_port(),
                 "--rollout-transport.type", "zmq", "--rollout-transport.port", harness.free_port(), max_async_level=2)


def test_rl_without_checkpoints_leaves_none():
    with harness.workspace("rl-plain") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=400)
        interrupt(["rl", "@", config, "--output-dir", folder / "out"], folder / "log", lambda: (folder / "out/rollouts/step_2").exists())
        check(not (folder / "out/checkpoints").exists() and not (folder / "out/weights").exists(), "checkpoints were off")


def test_roles_that_wait_for_others():
    with harness.workspace("waiting") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model())
        prl("rl", "@", config, "--output-dir", folder / "out", "--deployment.type", "single_node", "--inference.server.port",
            harness.free_port(), "--dry-run")
        for role, sign in (("orchestrator", "waiting for inference"), ("trainer", "")):
            log = folder / f"{role}.log"
            ready = folder / "out/broadcasts/step_0/STABLE" if role == "trainer" else None
            interrupt([role, "@", folder / f"out/configs/{role}.json"], log,
                      lambda: ready.exists() if ready else sign in log.read_text())


def test_sft():
    with harness.workspace("sft") as folder:
        model = harness.tiny_model(folder / "model")
        harness.sft_data(folder / "data.jsonl", 64)
        out = folder / "out"
        text = interrupt(["sft", "--model.name", model, "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
                          "--max-steps", 100000, "--ckpt", "--output-dir", out], folder / "log",
                         lambda: len(harness.metrics(out)) >= 3 if out.exists() else False)
        step = last_step(out)
        check(step >= 3 and (out / f"weights/step_{step}/model.safetensors").exists(), f"nothing saved of step {step}")
        check(f"sft stopped after step {step}," in text, f"no summary: {text[-1000:]}")
        check(json.loads((out / f"checkpoints/step_{step}/trainer/progress.json").read_text())["step"] == step, "another step inside")


def test_inference():
    with harness.workspace("inference") as folder:
        port = harness.free_port()
        interrupt(["inference", "--model.name", harness.warm_model(), "--server.port", port], folder / "log",
                  lambda: harness.is_healthy(port), status=0, seconds=5)


def test_eval():
    with harness.workspace("eval") as folder:
        arguments = ["eval", "--model.name", harness.warm_model(), "--env.id", "reverse-text", "--env.args", json.dumps(harness.ENV_ARGS),
                     "--num-examples", 50, "--group-size", 64, "--output-dir", folder / "out", "--max-concurrent", 4]
        text = interrupt(arguments, folder / "log", lambda: any(path.stat().st_size for path in (folder / "out").rglob("results.jsonl")))
        results = next((folder / "out").rglob("results.jsonl"))
        done = len(results.read_text().splitlines())
        check(0 < done < 3200 and str(results.parent) in text, f"{done} results, and no word on how to go on: {text[-1000:]}")
        prl(*arguments, "--resume-path", results.parent)
        check(len(results.read_text().splitlines()) == 3200, "the continued evaluation has another number of results")


harness.main(test_rl_in_one_process, test_rl_over_processes, test_rl_without_checkpoints_leaves_none,
             test_roles_that_wait_for_others, test_sft, test_inference, test_eval)
