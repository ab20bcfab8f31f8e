#!/usr/bin/env python3
"""Lock-step runs: the same seed gives the same bits, a stopped and resumed run continues them, and mismatch_kl is exactly 0."""
import re
import signal

import harness
from harness import check, prl

LOCK_STEP = {"max_async_level": 0}


def run(folder, name, *flags, model=None, **top):
    """One RL run in `folder/name`; returns the folder of the run."""
    out = folder / name
    config = harness.rl_config(folder / f"{name}.toml", model or harness.warm_model(), **{**LOCK_STEP, **top})
    prl("rl", "@", config, "--output-dir", out, "--ckpt", *flags)
    return out


def state(out, step):
    """Digests of the served weights, the masters and the optimizer state."""
    return (harness.digest(out / f"weights/step_{step}", "*.safetensors"),
            harness.digest(out / f"checkpoints/step_{step}/trainer", "*.safetensors"))


def check_no_mismatch(out, steps):
    rows = harness.metrics(out)
    for step in range(1, steps + 1):
        check(step in rows, f"{out}: no metrics of step {step}")
        for key in ("mismatch_kl/all/mean", "mismatch_kl/all/max"):
            check(rows[step].get(key) == 0, f"step {step}: {key} = {rows[step].get(key)}, wanted exactly 0")
        check(rows[step]["entropy/all/mean"] > 0, f"step {step} trained on nothing")
        check(rows[step]["scheduler/async_level"] == 0 and rows[step]["off_policy_level/all/max"] == 0, f"step {step} is not lock-step")


def test_the_same_seed_gives_the_same_bits():
    with harness.workspace("repeat") as folder:
        first, second = run(folder, "first"), run(folder, "second", "--compute.num-threads", 1)
        check(state(first, 10) == state(second, 10), "two runs of one seed differ after 10 steps")
        check(state(first, 10) != state(run(folder, "other", seed=43), 10), "another seed gave the same weights")
        initial = harness.digest(harness.warm_model(), "*.safetensors")
        check(harness.digest(first / "weights/step_10", "*.safetensors") != initial, "10 steps changed no weight")
        check_no_mismatch(first, 10)
        rewards = [harness.metrics(first)[step]["reward/all/mean"] for step in range(1, 11)]
        check(len(set(rewards)) > 5 and max(rewards) > 0, f"rewards say nothing: {rewards}")


def test_settings_of_speed_and_memory_change_no_bit():
    with harness.workspace("settings") as folder:
        wanted = state(run(folder, "plain"), 10)
        # 24 blocks of 16 tokens hold two of the sixteen rollouts: the others wait or are preempted and computed again.
        crowded = run(folder, "crowded", "--inference.kv.num-blocks", 24, "--inference.max-num-batched-tokens", 32,
                      "--inference.max-num-seqs", 8)
        log = (crowded / "logs/latest/inference.log").read_text() + (crowded / "logs/latest/rl.log").read_text()
        check("24 KV blocks" in log, f"the small cache is not in use: {log[:1000]}")
        check(state(crowded, 10) == wanted, "chunked prefill and preemption change the bits")
        check_no_mismatch(crowded, 10)
        offloaded = run(folder, "offloaded", "--inference.kv.num-blocks", 24, "--inference.kv-cache-offload.type", "native",
                        "--inference.kv-cache-offload.cpu.num-bytes", 8 << 20)
        log = (offloaded / "logs/latest/inference.log").read_text() + (offloaded / "logs/latest/rl.log").read_text()
        check("more KV blocks in host memory" in log, f"host memory is not in use: {log[:1000]}")
        check(state(offloaded, 10) == wanted, "blocks from host memory change the bits")
        check_no_mismatch(offloaded, 10)
        # Drafts are looked up, or drawn by the model that the run begins with.
        for name, least_rate, flags in (
                ("lookups", 0.1, ("--inference.speculative.num-tokens", 4, "--inference.speculative.min-ngram", 1)),
                ("drawn", 0.5, ("--inference.speculative.num-tokens", 3, "--no-inference.speculative.adaptive",
                                "--inference.speculative.draft-model", harness.warm_model()))):
            guessing = run(folder, name, *flags)
            log = (guessing / "logs/latest/inference.log").read_text() + (guessing / "logs/latest/rl.log").read_text()
            drafts = re.search(r"(\d+) of (\d+) draft tokens came true", log)
            check(drafts and int(drafts[1]) > least_rate * int(drafts[2]) > 0, f"{name}: too few drafts came true: {log[-1000:]}")
            check(state(guessing, 10) == wanted, f"speculative decoding changes the bits: {name}")
            check_no_mismatch(guessing, 10)
        check(state(run(folder, "uncached", "--no-inference.enable-prefix-caching", "--inference.max-num-seqs", 1), 10) == wanted,
              "the prefix cache or the batch changes the bits")
        check(state(run(folder, "recomputed", "--trainer.model.ac"), 10) == wanted, "activation checkpointing changes the bits")
        check(state(run(folder, "selective", "--trainer.model.ac.mode", "selective", "--trainer.model.ac.targets", "norm,mlp"), 10) == wanted,
              "selective recomputation changes the bits")


def test_several_turns_are_exact():
    with harness.workspace("turns") as folder:
        for strategy in ("interleaved", "branching"):
            config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=3, seq_len=1024, **LOCK_STEP)
            text = config.read_text().replace("reverse-text", "alphabet-sort").replace("max_model_len = 256", "max_model_len = 1024")
            config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("args")))
            out = folder / strategy
            # The model does not know this task, so every rollout counts, with its reward as the advantage or none.
            prl("rl", "@", config, "--output-dir", out, "--orchestrator.trajectory-strategy", strategy, "--orchestrator.batch-size", 8,
                "--orchestrator.train.sampling.max-completion-tokens", 24, "--no-orchestrator.train.filter-zero-advantages")
            check_no_mismatch(out, 3)
            turns = [harness.metrics(out)[step]["num_turns/all/max"] for step in (1, 2, 3)]
            check(max(turns) > 1, f"no rollout had several turns: {turns}")


def test_bfloat16_is_exact_too():
    with harness.workspace("bf16") as folder:
        first = run(folder, "first", "--compute.dtype", "bfloat16")
        check_no_mismatch(first, 10)
        check(state(first, 10) == state(run(folder, "second", "--compute.dtype", "bfloat16"), 10), "two runs of one seed differ")


def test_weights_of_eight_bits_are_exact_too():
    with harness.workspace("eight") as folder:
        eight = ("--trainer.model.quantization.type", "fp8")
        both = (*eight, "--trainer.model.quantization.activations")
        for dtype, how, without in (("float32", eight, ()), ("bfloat16", both, eight)):
            first = run(folder, f"first-{dtype}", *how, "--compute.dtype", dtype)
            check_no_mismatch(first, 10)
            wanted = state(first, 10)
            check(state(run(folder, f"plain-{dtype}", *without, "--compute.dtype", dtype), 10) != wanted, f"{how} changes nothing")
            port = ("--deployment.type", "single_node", "--inference.server.port", harness.free_port())
            check(state(run(folder, f"processes-{dtype}", *how, *port, "--compute.dtype", dtype), 10) == wanted, "a process per role differs")
        whole = run(folder, "whole", *eight, "--ckpt.interval", 5)
        run(folder, "parts", *eight, max_steps=5)
        check(state(run(folder, "parts", *eight, "--ckpt.resume-step", 5), 10) == state(whole, 10), "a resumed run differs")
        _, error = prl("rl", "@", folder / "whole.toml", "--inference.model.quantization", "fp8", "--output-dir", folder / "one", expect=1)
        check("trainer.model.quantization" in error, error)


def test_a_resumed_run_continues_the_same_bits():
    with harness.workspace("resume") as folder:
        whole = run(folder, "whole", "--ckpt.interval", 5)
        run(folder, "parts", max_steps=5)
        parts = run(folder, "parts", "--ckpt.resume-step", 5)
        check(state(parts, 10) == state(whole, 10), "stopped at 5 and resumed differs from 10 steps at once")
        a, b = harness.metrics(whole), harness.metrics(parts)
        for step in range(1, 11):
            for key in ("reward/all/mean", "reward/all/max", "loss/mean", "entropy/all/mean", "optim/grad_norm"):
                check(a[step][key] == b[step][key], f"step {step}: {key} {a[step][key]} against {b[step][key]}")


def test_an_interrupted_run_continues_the_same_bits():
    with harness.workspace("interrupt") as folder:
        whole = run(folder, "whole")
        out = folder / "parts"
        config = harness.rl_config(folder / "parts.toml", harness.warm_model(), **LOCK_STEP)
        with harness.running("rl", "@", config, "--output-dir", out, "--ckpt", log=folder / "parts.log") as process:
            harness.wait_until(lambda: (out / "rollouts/step_3").exists() or process.poll() is not None, 60, "step 3")
            process.send_signal(signal.SIGINT)
            check(process.wait(180) == 130, f"exit status {process.returncode}: {(folder / 'parts.log').read_text()[-2000:]}")
        stopped = max(int(path.name[5:]) for path in (out / "checkpoints").iterdir())
        check(3 <= stopped < 10, f"stopped after step {stopped}; the test wants it in the middle")
        prl("rl", "@", config, "--output-dir", out, "--ckpt", "--ckpt.resume-step", -1)
        log = (out / "logs/latest/trainer.log").read_text()
        check(f"resumed from {out}/checkpoints/step_{stopped}" in log, f"it did not resume from step {stopped}: {log}")
        check(state(out, 10) == state(whole, 10), f"interrupted after {stopped} and resumed differs from 10 steps at once")


def test_a_run_killed_again_and_again_continues_the_same_bits():
    with harness.workspace("killed") as folder:
        whole = run(folder, "whole")
        out = folder / "parts"
        config = harness.rl_config(folder / "parts.toml", harness.warm_model(), **LOCK_STEP)
        arguments = ["rl", "@", config, "--output-dir", out, "--ckpt.interval", 1, "--ckpt.keep-last", 2, "--ckpt.save-async",
                     "--ckpt.resume-step", -1]
        for step in (1, 3, 4, 7):
            with harness.running(*arguments, log=folder / "parts.log") as process:
                harness.wait_until(lambda: (out / f"rollouts/step_{step}").exists() or process.poll() is not None, 60, f"step {step}")
                process.kill()
                check(process.wait(10) == -signal.SIGKILL, f"it ended by itself: {(folder / 'parts.log').read_text()[-2000:]}")
        prl(*arguments)
        check(state(out, 10) == state(whole, 10), "killed four times and resumed differs from 10 steps at once")
        newest = harness.check_rows(out)
        check(newest == {"trainer": 10, "orchestrator": 10}, f"{newest}")
        left = [str(path) for path in out.rglob("*.tmp-*")]
        check(not left, f"left over from the dead: {left}")


def test_sft_resumes_with_the_same_bits():
    with harness.workspace("sft") as folder:
        model = harness.tiny_model(folder / "model")
        harness.sft_data(folder / "data.jsonl", 64)

        def sft(name, steps, *flags):
            prl("sft", "--model.name", model, "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
                "--optim.lr", "1e-3", "--max-steps", steps, "--ckpt", "--output-dir", folder / name, *flags)

        sft("whole", 10)
        sft("parts", 5)
        sft("parts", 10, "--ckpt.resume-step", 5)
        check(state(folder / "whole", 10) == state(folder / "parts", 10), "SFT stopped at 5 and resumed differs from 10 steps at once")
        losses = [[harness.metrics(folder / name)[step]["loss/mean"] for step in range(1, 11)] for name in ("whole", "parts")]
        check(losses[0] == losses[1], f"losses differ: {losses}")
        sft("other", 10, "--data.seed", 1)
        check(state(folder / "whole", 10) != state(folder / "other", 10), "another order of the data gave the same weights")


harness.main(test_the_same_seed_gives_the_same_bits, test_settings_of_speed_and_memory_change_no_bit, test_several_turns_are_exact,
             test_bfloat16_is_exact_too, test_weights_of_eight_bits_are_exact_too, test_a_resumed_run_continues_the_same_bits,
             test_an_interrupted_run_continues_the_same_bits, test_a_run_killed_again_and_again_continues_the_same_bits,
             test_sft_resumes_with_the_same_bits)
