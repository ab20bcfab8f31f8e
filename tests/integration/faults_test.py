#!/usr/bin/env python3
"""Faults between processes: a port that is taken, servers of another run, queue files that vanish, closed terminals, silent waits."""
import contextlib
import os
import re
import signal
import time

import harness
from harness import check, prl


def arguments(folder, out, port, *flags, **top):
    config = harness.rl_config(folder / f"{out.name}.toml", harness.warm_model(), **{"max_async_level": 0, "max_steps": 500, **top})
    return ["rl", "@", config, "--output-dir", out, "--ckpt", "--ckpt.interval", 2, "--deployment.type", "single_node",
            "--inference.server.port", port, *flags]


@contextlib.contextmanager
def going(folder, name, port, *flags, **top):
    """A run that has trained two steps: (process, folder of its files, its console)."""
    out, log = folder / name, folder / f"{name}.log"
    with harness.running(*arguments(folder, out, port, *flags, **top), log=log) as process:
        harness.wait_until(lambda: (out / "checkpoints/step_2/trainer/manifest.json").exists() or process.poll() is not None, 120,
                           "the checkpoint of step 2")
        check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
        yield process, out, log


def steps_done(out):
    return max((int(path.name[5:]) for path in (out / "rollouts").glob("step_*")), default=0)


def test_a_second_run_leaves_the_first_ones_server_alone():
    with harness.workspace("port") as folder:
        port = harness.free_port()
        with going(folder, "first", port) as (process, out, log):
            server = harness.role_pids(log)["inference"]
            # The second launcher sees the port before anything is started.
            _, stderr = prl(*arguments(folder, folder / "second", port), expect=1)
            check("inference.server.port" in stderr and f"process {server} (" in stderr, f"the port's owner is not named: {stderr}")
            # Its roles, had they been started, would not have been deceived: neither side takes the other for its own.
            prl(*arguments(folder, folder / "third", port), "--dry-run")
            identity = {"PRL_RUN_ID": "another", "PRL_RUN_SERVERS": f"http://localhost:{port} http://127.0.0.1:{port}"}
            _, stderr = prl("orchestrator", "@", folder / "third/configs/orchestrator.json", "--student.client.wait-for-ready-timeout", 12,
                            env=identity, expect=1)
            check("another process has taken the port" in stderr, f"the orchestrator believed the server: {stderr}")
            _, stderr = prl("inference", "@", folder / "third/configs/inference.json", expect=1)
            check(f"process {server} (" in stderr, f"a server that cannot bind does not say why: {stderr}")
            for headers in ({}, {"X-PRL-Run-ID": "another"}):
                for route, body in (("/update_weights", {"weight_dir": str(harness.warm_model())}), ("/reload_weights", {})):
                    status, reply = harness.request(port, "POST", route, body, headers)
                    check(status == 421, f"{route} of a stranger: {status} {reply}")
            before = steps_done(out)
            harness.wait_until(lambda: steps_done(out) > before + 1 or process.poll() is not None, 60, "the first run to go on")
            check(process.poll() is None, f"the first run was ended: {log.read_text()[-2000:]}")


def version(port):
    return harness.request(port, "GET", "/version")[1]


def test_a_server_started_by_hand_takes_weights_from_one_run():
    with harness.workspace("claim") as folder, contextlib.ExitStack() as roles:
        port = harness.free_port()

        def start(run, role):
            log = folder / f"{run}-{role}.log"
            return roles.enter_context(harness.running(role, "@", folder / f"{run}/configs/{role}.json", log=log)), log

        for run in ("first", "second"):
            prl(*arguments(folder, folder / run, port, "--rollout-transport.type", "filesystem"), "--dry-run")
        start("first", "inference")
        start("first", "trainer")
        orchestrator, log = start("first", "orchestrator")
        harness.wait_until(lambda: steps_done(folder / "first") >= 2 or orchestrator.poll() is not None, 120, "two steps of the first run")
        check(orchestrator.poll() is None, f"the first run ended early: {log.read_text()[-3000:]}")
        holder = version(port)["claimed_by"]
        check("(first)" in holder, holder)
        start("second", "trainer")
        _, stderr = prl("orchestrator", "@", folder / "second/configs/orchestrator.json", expect=1)
        check(f"holds the policy of run {holder}" in stderr, stderr[-3000:])
        check(steps_done(folder / "second") == 0, "the second run trained with the first one's server")
        orchestrator.send_signal(signal.SIGTERM)
        harness.wait_until(lambda: orchestrator.poll() is not None, 60, "the first orchestrator to end")
        check("claimed_by" not in version(port), "the server was not released")


def test_a_queue_file_that_vanishes_ends_the_run():
    with harness.workspace("vanished") as folder, going(folder, "run", harness.free_port(), max_async_level=2) as (process, out, log):
        trainer = harness.role_pids(log)["trainer"]
        os.kill(trainer, signal.SIGSTOP)
        try:
            found = harness.wait_until(lambda: list((out / "rollouts").glob("step_*/rank_0.bin")), 60, "a batch that is not taken")
            for path in found:
                path.unlink()
        finally:
            os.kill(trainer, signal.SIGCONT)
        status = process.wait(180)
        text = log.read_text()
        check(status == 1 and "was sent, but" in text and "rank_0.bin is not there any more" in text, f"{status}: {text[-3000:]}")


def test_waits_between_processes_are_told():
    with harness.workspace("waits") as folder, going(folder, "run", harness.free_port()) as (process, out, log):
        pids = harness.role_pids(log)

        def told(pattern, seconds=40):
            harness.wait_until(lambda: re.search(pattern, log.read_text()), seconds, f"a line that matches {pattern!r}")

        for role, pattern in (("trainer", r"WARNING \[orchestrator\] the orchestrator has been waiting for the trainer to publish a policy"),
                              ("orchestrator", r"WARNING .*the trainer has been waiting for the orchestrator's samples of step \d+ since"),
                              ("inference", r"WARNING \[orchestrator\] the orchestrator has been waiting for inference to (take|finish)")):
            os.kill(pids[role], signal.SIGSTOP)
            try:
                began = time.monotonic()
                told(pattern + r".*at the latest until \d\d:\d\d:\d\d")
                check(time.monotonic() - began < 30, f"{role}: said after {time.monotonic() - began:.0f} s")
            finally:
                os.kill(pids[role], signal.SIGCONT)
        os.kill(pids["inference"], signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGINT)
            told(r"WARNING the launcher has been waiting for its roles to stop since .*inference \(pid")
        finally:
            os.kill(pids["inference"], signal.SIGCONT)
        check(process.wait(180) == 130, f"exit status {process.returncode}: {log.read_text()[-2000:]}")


def test_a_closed_terminal_ends_a_run_cleanly():
    with harness.workspace("hangup") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=400)
        out, log = folder / "out", folder / "log"
        with contextlib.ExitStack() as stack:
            with harness.hangups(signal.SIG_DFL):
                process = stack.enter_context(harness.running("rl", "@", config, "--output-dir", out, "--ckpt", log=log))
            harness.wait_until(lambda: (out / "rollouts/step_3").exists() or process.poll() is not None, 60, "step 3")
            check(process.poll() is None, f"the run ended before the terminal was closed: {log.read_text()[-2000:]}")
            process.send_signal(signal.SIGHUP)
            status = process.wait(180)
        text = log.read_text()
        check(status == 130 and "the terminal was closed" in text, f"exit status {status}: {text[-2000:]}")
        saved = list((out / "checkpoints").glob("step_*/trainer/manifest.json"))
        check(saved, f"nothing was saved: {text[-2000:]}")
        # Under nohup the signal is ignored, and must stay so.
        config = harness.rl_config(folder / "short.toml", harness.warm_model(), max_steps=6)
        log = folder / "nohup.log"
        with contextlib.ExitStack() as stack:
            with harness.hangups(signal.SIG_IGN):
                kept = stack.enter_context(harness.running("rl", "@", config, "--output-dir", folder / "kept", log=log))
            harness.wait_until(lambda: (folder / "kept/rollouts/step_2").exists() or kept.poll() is not None, 60, "step 2")
            kept.send_signal(signal.SIGHUP)
            check(kept.wait(360) == 0, f"exit status {kept.returncode}: {log.read_text()[-2000:]}")


harness.main(test_a_second_run_leaves_the_first_ones_server_alone, test_a_server_started_by_hand_takes_weights_from_one_run,
             test_a_queue_file_that_vanishes_ends_the_run, test_waits_between_processes_are_told, test_a_closed_terminal_ends_a_run_cleanly)
