#!/usr/bin/env python3
"""Weights that are damaged on their way from the trainer to the engine stop the run before any rollout of them counts."""
import contextlib
import json
import os
import signal
import struct
import time

import harness
from harness import check


def flip_a_weight(path):
    """Changes one bit of one number in the middle of a tensor; the file stays a valid safetensors file."""
    data = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + header_bytes])
    name, tensor = max(((n, t) for n, t in header.items() if n != "__metadata__"), key=lambda item: item[1]["data_offsets"][1])
    begin, end = tensor["data_offsets"]
    data[8 + header_bytes + (begin + end) // 2] ^= 0x10
    path.write_bytes(data)
    return path.name


def flip_a_weight_without_checksum(path):
    """The same as another program would write it: no checksum, so that the proof alone can tell."""
    name = flip_a_weight(path)
    path.write_bytes(harness.without_checksum(path.read_bytes()))
    return name


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])
    return path.name


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def run_with_damage(folder, damage):
    """Damages a published version before the orchestrator sees it; (version, launcher's log, orchestrator's log, folder)."""
    out, log = folder / "out", folder / "rl.log"
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=50)
    with harness.running("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--inference.server.port",
                         harness.free_port(), log=log) as process:
        def wait_for(condition, what):
            harness.wait_until(lambda: condition() or process.poll() is not None, 60, what)
            check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")

        wait_for(lambda: (out / "broadcasts/step_1/STABLE").exists(), "the first update")
        pids = harness.role_pids(log)

        # What the orchestrator sends next may need the trainer once more; then the stop is tried again.
        def samples_lie_ready(version):
            names = [out / f"rollouts/step_{version}/rank_0.{state}" for state in ("bin", "taken")]
            with contextlib.suppress(harness.Failure):
                return harness.wait_until(lambda: any(name.exists() for name in names), 3, "samples")
            return False

        for _ in range(10):
            with stopped(pids["trainer"]):
                version = max(int(path.name[5:]) for path in (out / "broadcasts").glob("step_*") if (path / "STABLE").exists()) + 1
                if samples_lie_ready(version):
                    os.kill(pids["orchestrator"], signal.SIGSTOP)
                    break
            time.sleep(0.2)  # stopped again at once, the trainer would never end the step that it was stopped in
        else:
            raise harness.Failure("in ten tries the trainer was never stopped while samples waited for it")
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: os.kill(pids["orchestrator"], signal.SIGCONT))
            wait_for(lambda: (out / f"broadcasts/step_{version}/STABLE").exists(), f"version {version}")
            what = damage(out / f"broadcasts/step_{version}/model.safetensors")
        status = process.wait(120)
    text = log.read_text()
    check(status == 1, f"exit status {status}, wanted 1: {text[-3000:]}")
    check("orchestrator exited with status 1" in text, f"the message does not name the role: {text[-2000:]}")
    check(version + 1 not in harness.metrics(out), f"step {version + 1} was trained on rollouts of damaged weights")
    return version, what, text, (out / "logs/latest/orchestrator.log").read_text()


def test_one_flipped_bit_is_found_by_the_proof():
    with harness.workspace("flip") as folder:
        version, _, text, log = run_with_damage(folder, flip_a_weight_without_checksum)
        for where in (text, log):
            check(f"do not hold the same policy after the update to version {version}" in where and "checksum" in where,
                  f"the message does not say what is wrong: {where[-2000:]}")


def test_a_truncated_broadcast_is_named():
    with harness.workspace("truncate") as folder:
        version, name, text, _ = run_with_damage(folder, truncate)
        check(f"broadcasts/step_{version}/{name}" in text, f"the message does not name the file: {text[-2000:]}")


def test_a_flipped_bit_is_found_by_the_checksum():
    with harness.workspace("checksum") as folder:
        version, name, text, _ = run_with_damage(folder, flip_a_weight)
        check(f"broadcasts/step_{version}/{name}" in text and "checksum" in text, f"the message does not name the file: {text[-2000:]}")


harness.main(test_one_flipped_bit_is_found_by_the_proof, test_a_flipped_bit_is_found_by_the_checksum, test_a_truncated_broadcast_is_named)
