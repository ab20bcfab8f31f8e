#!/usr/bin/env python3
"""`prl replay`: an asynchronous run, which no second run repeats, is trained once more to the same weights from what it recorded."""
import os
import pathlib
import re

import harness
from harness import check, prl

STEPS = 8


def record(folder, *flags, name="run", **top):
    """An asynchronous run that records its steps; its folder."""
    out = folder / name
    config = harness.rl_config(folder / f"{name}.toml", harness.warm_model(), **{"max_async_level": 2, "max_steps": STEPS, **top})
    prl("rl", "@", config, "--output-dir", out, "--ckpt", "--trainer.record", *flags)
    return out


def weights(out, step=STEPS):
    return harness.digest(pathlib.Path(out) / f"weights/step_{step}", "*.safetensors")


def replayed(error):
    """(steps with the weights of the recorded run, last step) of what a replay says at its end."""
    found = re.search(r"replayed (\d+) steps up to step (\d+): the weights of each", error)
    return found and (int(found[1]), int(found[2]))


def test_an_asynchronous_run_is_repeated_bit_for_bit():
    with harness.workspace("replay") as folder:
        # A schedule that depends on the length of the run.
        run = record(folder, "--ckpt.interval", 3, "--trainer.scheduler.type", "linear", "--trainer.scheduler.warmup-steps", 2,
                     "--trainer.scheduler.decay-steps", 4)
        rows = harness.metrics(run)
        check(any(rows[step].get("off_policy_level/all/max", 0) > 0 for step in rows), "the run was not asynchronous: it shows nothing")
        out, error = prl("replay", run)
        check(replayed(out + error) == (STEPS, STEPS), f"the replay says {(out + error)[-600:]}")
        check(weights(folder / "run-replay") == weights(run), "the replay made other weights")
        again = harness.metrics(folder / "run-replay")
        for step in range(1, STEPS + 1):
            for key in ("loss/mean", "optim/grad_norm", "optim/lr", "mismatch_kl/all/mean", "entropy/all/mean"):
                check(again[step][key] == rows[step][key], f"step {step}: {key} is {again[step][key]}, recorded {rows[step][key]}")
        # A part of it, from a checkpoint, by two ranks.
        out, error = prl("replay", run, "--from-step", 3, "--num-ranks", 2, "--output-dir", folder / "part")
        log = out + error + "".join(path.read_text() for path in (folder / "part/logs").rglob("*.log"))
        check(replayed(log) == (STEPS - 3, STEPS), f"the replay of a part says {log[-600:]}")
        out, error = prl("replay", run, "--last-step", 2, "--output-dir", folder / "first")
        check(replayed(out + error) == (2, 2), f"the replay of two steps says {(out + error)[-600:]}")


def test_the_same_samples_with_other_settings():
    with harness.workspace("what-if") as folder:
        run = record(folder)
        out, error = prl("replay", run, "--trainer.loss.type", "gspo", "--trainer.optim.lr", 1e-5, "--output-dir", folder / "slow")
        text = out + error
        check("from here on this run goes its own way" in text and f"replayed up to step {STEPS}: 0 steps made" in text, text[-900:])
        check(weights(folder / "slow") != weights(run), "another learning rate made the same weights")
        _, error = prl("replay", run, "--trainer.optim.lr", 1e-5, "--require-same", "--output-dir", folder / "same", expect=1)
        check("the weights after step 1 have the checksum" in error, error[-600:])
        # Settings of memory decide no bit, and so the weights must be the same.
        out, error = prl("replay", run, "--trainer.model.ac", "--output-dir", folder / "recomputed")
        check(replayed(out + error) == (STEPS, STEPS), f"the replay with recomputation says {(out + error)[-600:]}")


def test_several_processes_and_a_resume_record_too():
    with harness.workspace("replay-processes") as folder:
        ports = ("--deployment.type", "single_node", "--inference.server.port", harness.free_port())
        run = record(folder, *ports, "--ckpt.interval", 4, max_steps=4)
        config = harness.rl_config(folder / "run.toml", harness.warm_model(), max_async_level=2, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", run, "--ckpt", "--ckpt.resume-step", -1, "--trainer.record", *ports)
        out, error = prl("replay", run, "--from-step", 4)
        check(replayed(out + error) == (STEPS - 4, STEPS), f"the replay says {(out + error)[-600:]}")
        check(weights(folder / "run-replay") == weights(run), "the replay made other weights")


def test_what_cannot_be_replayed_is_said():
    with harness.workspace("replay-errors") as folder:
        _, error = prl("replay", folder / "nowhere", expect=1)
        check("configs/trainer.toml is not there" in error, error)
        run = record(folder)
        first = run / "rollouts/step_3/recorded_batch.bin"
        kept = first.read_bytes()
        first.write_bytes(kept[:100] + bytes([kept[100] ^ 1]) + kept[101:])
        _, error = prl("replay", run, "--output-dir", folder / "damaged", expect=1)
        check(str(first) in error and "damaged" in error, error[-600:])
        os.remove(run / "rollouts/step_1/recorded_batch.bin")
        _, error = prl("replay", run, "--output-dir", folder / "none", expect=1)
        check("step 1 was not recorded" in error and "trainer.record" in error, error[-600:])
        _, error = prl("rl", "@", folder / "run.toml", "--trainer.data.recorded.run", run, "--output-dir", folder / "rl", expect=1)
        check("prl replay" in error, error[-600:])


if __name__ == "__main__":
    harness.main(test_an_asynchronous_run_is_repeated_bit_for_bit, test_the_same_samples_with_other_settings,
                 test_several_processes_and_a_resume_record_too, test_what_cannot_be_replayed_is_said)
