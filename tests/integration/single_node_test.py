#!/usr/bin/env python3
"""`prl rl` with a process per role: the bits of the single process, deaths of roles, and what a resume picks up."""
import contextlib
import os
import pathlib
import shutil
import signal
import time

import harness
from harness import check, prl

ROLES = ("inference", "orchestrator", "trainer")
STEPS = 8


def arguments(folder, out, *flags, **top):
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), **{"max_async_level": 0, "max_steps": STEPS, **top})
    return ["rl", "@", config, "--output-dir", out, "--ckpt", "--ckpt.interval", 2, "--deployment.type", "single_node",
            "--inference.server.port", harness.free_port(), *flags]


def one_process(folder, steps=STEPS):
    """The same run in one process, as the reference."""
    config = harness.rl_config(folder / "whole.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
    prl("rl", "@", config, "--output-dir", folder / "whole", "--ckpt")
    return weights(folder / "whole", steps)


def weights(out, step):
    return harness.digest(pathlib.Path(out) / f"weights/step_{step}", "*.safetensors")


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def start_and_wait(folder, out, log, *flags):
    """A run that has saved step 2 and goes on; (process manager, role pids)."""
    run = harness.running(*arguments(folder, out, *flags, max_steps=500), log=log)
    process = run.__enter__()
    try:
        harness.wait_until(lambda: (out / "checkpoints/step_2/trainer/manifest.json").exists() or process.poll() is not None, 60,
                           "the checkpoint of step 2")
        check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
    except BaseException:
        run.__exit__(None, None, None)
        raise
    return run, process, harness.role_pids(log)


def test_processes_give_the_bits_of_one_process():
    with harness.workspace("processes") as folder:
        wanted = one_process(folder)
        for transport in ("filesystem", "zmq"):
            out = folder / transport
            flags = ["--rollout-transport.type", transport]
            if transport == "zmq":
                flags += ["--rollout-transport.port", harness.free_port(), "--inference.server.api-key", "key-of-users",
                          "--inference.server.admin-api-key", "key-of-admins"]
            prl(*arguments(folder, out, *flags))
            check(weights(out, STEPS) == wanted, f"processes over {transport} gave other weights than one process")
            for role in (*ROLES, "rl"):
                check((out / f"logs/latest/{role}.log").stat().st_size > 0, f"no log of {role}")
            rows = harness.metrics(out)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")
        told = [path for path in out.rglob("*") if path.is_file() and b"key-of-" in path.read_bytes()]
        check(not told, f"keys are written to {told}")
        _, stderr = prl("inference", "@", out / "configs/inference.json", expect=1)
        check("--server.api-key" in stderr and "--server.admin-api-key" in stderr, f"started without its keys: {stderr}")


def test_a_benchmark_of_all_roles_waits_for_none():
    with harness.workspace("bench-roles") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model())
        stdout, stderr = prl("rl", "@", config, "--bench", "--output-dir", folder / "out", "--deployment.type", "single_node",
                             "--inference.server.port", harness.free_port(), "--orchestrator.bench.output-json", folder / "sampler.json", timeout=300)
        check("Overall" in stdout + stderr, f"no table of the trainer: {stdout}\n{stderr[-3000:]}")
        log = (folder / "out/logs/latest/orchestrator.log").read_text()
        check((folder / "sampler.json").exists() and "finished after step 4" in log, f"the orchestrator did not measure: {log[-2000:]}")


def test_roles_started_by_hand_from_what_a_dry_run_wrote():
    with harness.workspace("by-hand") as folder:
        out = folder / "out"
        prl(*arguments(folder, out, "--dry-run", max_steps=3))
        with contextlib.ExitStack() as stack:
            started = {role: stack.enter_context(harness.running(role, "@", out / f"configs/{role}.json", log=folder / f"{role}.log"))
                       for role in ("trainer", "inference", "orchestrator")}
            for role in ("trainer", "orchestrator"):
                check(started[role].wait(180) == 0, f"{role}: {(folder / f'{role}.log').read_text()[-2000:]}")
            started["inference"].send_signal(signal.SIGTERM)
            check(started["inference"].wait(10) == 0, f"{(folder / 'inference.log').read_text()[-2000:]}")
        check(weights(out, 3) == one_process(folder, 3), "roles started by hand gave other weights than one process")


def test_a_killed_role_ends_the_others_and_a_resume_continues():
    with harness.workspace("kill") as folder:
        wanted = one_process(folder, 12)
        for number, role in enumerate(ROLES):
            out, log = folder / role, folder / f"{role}.log"
            # A half step must not push the last whole one out; that an engine can be started again is tested elsewhere.
            flags = ["--ckpt.keep-last", 1, "--deployment.max-engine-restarts", 0, "--deployment.max-orchestrator-restarts", 0]
            if number % 2:
                flags += ["--rollout-transport.type", "zmq", "--rollout-transport.port", harness.free_port()]
            run, process, pids = start_and_wait(folder, out, log, *flags)
            try:
                os.kill(pids[role], signal.SIGKILL)
                began = time.monotonic()
                status = process.wait(120)
                seconds = time.monotonic() - began
            finally:
                run.__exit__(None, None, None)
            text = log.read_text()
            check(status == 1, f"{role} killed: exit status {status}, wanted 1")
            check(f"{role} was killed by signal 9" in text, f"the message does not name {role}: {text[-2000:]}")
            check("did not stop within" not in text, f"a role had to be killed: {text[-2000:]}")
            check(seconds < 20, f"{seconds:.1f} s until the others had ended")
            left = [other for other, pid in pids.items() if is_alive(pid)]
            check(not left, f"still running: {left}")
            # Resumed, the run gives the weights of a run that never died: nothing half-written came in, nothing was lost.
            stdout, stderr = prl(*arguments(folder, out, *flags, "--ckpt.resume-step", -1, max_steps=12))
            trainer_log = (out / "logs/latest/trainer.log").read_text()
            check("resumed from" in trainer_log, f"{role}: the trainer did not resume: {trainer_log[:2000]}")
            check("starts from scratch" not in stdout + stderr, f"{role}: the last complete checkpoint was gone: {stderr[-2000:]}")
            newest = harness.check_rows(out)
            check(newest["trainer"] == newest["orchestrator"] == 12, f"{role}: {newest}")
            check(not [path for path in out.rglob("*.tmp-*")], f"{role}: temporary files stay: {list(out.rglob('*.tmp-*'))}")
            check(weights(out, 12) == wanted, f"{role} killed and resumed: other weights than a run that never died")


def test_roles_end_when_the_launcher_is_killed():
    with harness.workspace("launcher") as folder:
        run, process, pids = start_and_wait(folder, folder / "out", folder / "rl.log")
        try:
            _, stderr = prl(*arguments(folder, folder / "out"), expect=1)
            check(f"in use by a run that process {process.pid} started" in stderr, f"a second run in the same folder: {stderr}")
            check(process.poll() is None, "the second run ended the first")
            process.kill()
            process.wait(5)
            harness.wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), 20, f"the roles {pids} to end")
        finally:
            run.__exit__(None, None, None)


def test_half_written_and_damaged_checkpoints_are_not_picked():
    with harness.workspace("half") as folder:
        wanted = one_process(folder)
        out = folder / "out"
        prl(*arguments(folder, out, max_steps=4))
        checkpoints = out / "checkpoints"
        # A truncated one, one without its manifest, one whose writer died, and weights that never got their marker.
        for step, unit, name in ((5, "trainer", "model.safetensors"), (6, "orchestrator", "state.json")):
            shutil.copytree(checkpoints / "step_4", checkpoints / f"step_{step}")
            manifest = checkpoints / f"step_{step}"
            for half in ("trainer", "orchestrator"):
                path = manifest / half / "manifest.json"
                path.write_text(path.read_text().replace('"step":4', f'"step":{step}'))
            damaged = manifest / unit / name
            damaged.write_bytes(damaged.read_bytes()[:-20])
        shutil.copytree(checkpoints / "step_4", checkpoints / "step_7")
        (checkpoints / "step_7/trainer/manifest.json").unlink()
        shutil.copytree(checkpoints / "step_4/trainer", checkpoints / "step_8/trainer.tmp-999999-0")
        broadcast = out / "broadcasts/step_9"
        shutil.copytree(out / "broadcasts/step_4", broadcast)
        (broadcast / "STABLE").unlink()
        (broadcast / "model.safetensors").write_bytes(b"half")

        for step, reason in ((5, "model.safetensors"), (6, "state.json"), (7, "lacks the part of: trainer"), (8, "lacks the part of: trainer")):
            _, stderr = prl(*arguments(folder, out, "--ckpt.resume-step", step), expect=1)
            check(reason in stderr and f"step_{step}" in stderr, f"resume from {step}: the message does not say why: {stderr}")
        _, stderr = prl(*arguments(folder, out, "--ckpt.resume-step", -1))
        for step, reason in ((5, "model.safetensors"), (6, "state.json")):
            check(f"skipping step {step}" in stderr and reason in stderr, f"no word about step {step}: {stderr}")
        check(weights(out, STEPS) == wanted, "the resumed run gave other weights than a run without interruption")
        check(not broadcast.exists(), "the half-written broadcast of a later step is still there")

        for step in (2, 4, 5, 6, 8):
            for path in checkpoints.glob(f"step_{step}/trainer/model.safetensors"):
                path.write_bytes(b"")
        _, stderr = prl(*arguments(folder, out, "--ckpt.resume-step", -1), expect=1)
        check("every checkpoint" in stderr and "damaged" in stderr, f"all damaged: {stderr}")


harness.main(test_processes_give_the_bits_of_one_process, test_a_benchmark_of_all_roles_waits_for_none, test_roles_started_by_hand_from_what_a_dry_run_wrote,
             test_a_killed_role_ends_the_others_and_a_resume_continues,
             test_roles_end_when_the_launcher_is_killed, test_half_written_and_damaged_checkpoints_are_not_picked)
