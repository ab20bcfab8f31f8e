#!/usr/bin/env python3
"""On a machine with a GPU: its runs agree with the CPU's, repeat to the bit, match their sampler exactly and stay within their plan."""
import json
import os
import re
import signal

import harness
from harness import check, prl

# Where there are several, `prl rl` would give each role one of its own.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

BFLOAT16 = ("--compute.dtype", "bfloat16")
QWEN3_06B = ("--vocab-size", 151936, "--hidden-size", 1024, "--intermediate-size", 3072, "--num-layers", 28, "--num-heads", 16,
             "--num-kv-heads", 8, "--head-dim", 128, "--max-position-embeddings", 40960, "--rope-theta", 1000000, "--dtype", "bfloat16")
# About as large, with linear attention in three of four layers.
QWEN35 = ("--family", "qwen3_5", "--vocab-size", 151936, "--hidden-size", 1024, "--intermediate-size", 3584, "--num-layers", 24, "--num-heads", 16,
          "--num-kv-heads", 4, "--head-dim", 128, "--max-position-embeddings", 8192, "--dtype", "bfloat16")


def needs_gpu():
    report = {row["subject"]: row["found"] for row in json.loads(prl("doctor", "--json")[0])}
    if "none" in report.get("gpu", "none"):
        raise harness.Skip(report.get("gpu", "no GPU"))


def compare(folder, command, steps, keys):
    """Runs `command` on both devices; fails unless every metric of `keys` agrees at every step within its tolerance."""
    rows = {}
    for device in ("cpu", "cuda"):
        out = folder / device
        prl(*command, "--compute.device", device, *BFLOAT16, "--output-dir", out)
        rows[device] = harness.metrics(out)
    for key, tolerance in keys.items():
        pairs = [(rows["cpu"][step][key], rows["cuda"][step][key]) for step in range(1, steps + 1)]
        worst = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
        check(worst < tolerance, f"{key} differs by a share of {worst:.4f} at worst, {tolerance} is allowed: {pairs[:3]} ... {pairs[-3:]}")
        print(f"      {key}: {pairs[0][0]:.5f} to {pairs[-1][0]:.5f}, largest relative difference {worst:.5f} over {steps} steps")


def test_fine_tuning_agrees_with_the_cpu():
    needs_gpu()
    with harness.workspace("gpu-sft") as folder:
        model, data = harness.tiny_model(folder / "model"), harness.sft_data(folder / "data.jsonl", 256)
        compare(folder, ("sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 50,
                         "--optim.lr", "2e-4"), 50, {"loss/mean": 0.02, "optim/grad_norm": 0.1})


def test_policy_steps_agree_with_the_cpu():
    needs_gpu()
    with harness.workspace("gpu-rl") as folder:
        compare(folder, ("trainer", "--model.name", harness.warm_model(), "--data.fake", "--model.seq-len", 256, "--max-steps", 20,
                         "--optim.lr", "1e-4"), 20, {"loss/mean": 0.05, "entropy/all/mean": 0.02, "mismatch_kl/all/mean": 0.05})


def test_lock_step_repeats_and_matches_exactly():
    needs_gpu()
    with harness.workspace("gpu-lock-step") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0)
        digests = []
        for name in ("first", "second"):
            out = folder / name
            prl("rl", "@", config, "--output-dir", out, "--ckpt", "--trainer.compute.device", "cuda")
            rows = harness.metrics(out)
            for step in range(1, 11):
                for key in ("mismatch_kl/all/mean", "mismatch_kl/all/max"):
                    check(rows[step][key] == 0, f"step {step}: {key} = {rows[step][key]}, wanted exactly 0")
            check(len({rows[step]["reward/all/mean"] for step in range(1, 11)}) > 5, "rewards say nothing")
            digests.append((harness.digest(out / "weights/step_10", "*.safetensors"),
                            harness.digest(out / "checkpoints/step_10/trainer", "*.safetensors")))
        check(digests[0] == digests[1], "two runs of one seed differ after 10 steps")


def test_lock_step_of_an_adapter_matches_exactly():
    needs_gpu()
    with harness.workspace("gpu-lock-step-adapter") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=6)
        for rank in (4, 16):
            out = folder / f"rank-{rank}"
            prl("rl", "@", config, "--output-dir", out, "--trainer.compute.device", "cuda", "--trainer.model.lora.rank", rank,
                "--trainer.model.lora.alpha", 16, "--trainer.optim.lr", "5e-3", "--ckpt", "--ckpt.weights.save-adapter-separately")
            rows = harness.metrics(out)
            worst = max(abs(rows[step]["mismatch_kl/all/max"]) for step in range(1, 7))
            check(worst == 0, f"rank {rank}: sampler and trainer differ: mismatch_kl {worst}")
            check(len({rows[step]["loss/mean"] for step in range(1, 7)}) > 3, "losses say nothing")


def test_a_mixture_of_experts_matches_exactly():
    needs_gpu()
    with harness.workspace("gpu-experts") as folder:
        # Sizes that the kernels for few rows of many experts take.
        model = harness.tiny_model(folder / "model", "--family", "qwen3_moe", "--num-experts", 8, "--num-experts-per-tok", 2, "--hidden-size", 128,
                                   "--moe-intermediate-size", 64, "--head-dim", 64)
        data = harness.sft_data(folder / "data.jsonl", 256)
        fine_tune = ("sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 40,
                     "--optim.lr", "2e-3", "--ckpt.weights-only")
        compare(folder, fine_tune, 40, {"loss/mean": 0.05, "routing_confidence/mean": 0.05})
        digests = {}
        for name, flags in {"kept": (), "again": (), "recomputed": ("--model.ac",)}.items():
            prl(*fine_tune, "--compute.device", "cuda", *BFLOAT16, "--output-dir", folder / name, *flags)
            digests[name] = harness.tensor_digest(folder / name / "weights/step_40")
        check(len(set(digests.values())) == 1, f"weights depend on the run or on what is recomputed: {digests}")
        config = harness.rl_config(folder / "rl.toml", folder / "kept/weights/step_40", max_async_level=0)
        digests = []
        # A larger rate ruins the policy within three steps, and then no batch has anything to train on.
        adapter = ("--trainer.model.lora.rank", 8, "--trainer.optim.lr", "1e-3")
        attention = (*adapter, "--trainer.model.lora.target-modules", "q_proj,v_proj,o_proj")
        for name, flags in {"first": (), "second": (), "adapter": adapter, "attention": attention}.items():
            out = folder / name
            prl("rl", "@", config, "--output-dir", out, "--ckpt", "--trainer.compute.device", "cuda", "--trainer.compute.dtype", "bfloat16", *flags)
            rows = harness.metrics(out)
            worst = max(abs(rows[step]["mismatch_kl/all/max"]) for step in range(1, 11))
            check(worst == 0, f"{name}: sampler and trainer differ: mismatch_kl {worst}")
            check(len({rows[step]["loss/mean"] for step in range(1, 11)}) > 3, f"{name}: losses say nothing")
            digests.append(harness.tensor_digest(out / "weights/step_10"))
        check(digests[0] == digests[1] and len(set(digests)) == 3, "two runs of one seed differ, or two adapters do not")
        # In lock-step tokens were sampled with the experts that the routers choose: replaying them changes nothing.
        prl("rl", "@", config, "--output-dir", folder / "replayed", "--ckpt", "--trainer.compute.device", "cuda", "--trainer.compute.dtype", "bfloat16",
            "--trainer.enable-router-replay")
        rows = harness.metrics(folder / "replayed")
        check(all(0.8 < rows[step]["replayed_tokens"] < 1 for step in range(1, 11)), f"{rows[1]['replayed_tokens']} of all tokens were replayed")
        check(harness.tensor_digest(folder / "replayed/weights/step_10") == digests[0], "replayed experts gave other weights")


def test_experts_by_scores_match_exactly():
    needs_gpu()
    with harness.workspace("gpu-glm") as folder:
        # A dense layer before a sparse one, shared experts, and half of each head rotated.
        model = harness.tiny_model(folder / "model", "--family", "glm4_moe", "--num-experts", 8, "--num-experts-per-tok", 2, "--hidden-size", 128,
                                   "--moe-intermediate-size", 64, "--head-dim", 64)
        data = harness.sft_data(folder / "data.jsonl", 256)
        fine_tune = ("sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 40,
                     "--optim.lr", "2e-3", "--ckpt.weights-only")
        # Later on a token that goes to another expert for a last bit's sake shows in the loss.
        compare(folder, fine_tune, 12, {"loss/mean": 0.05, "routing_confidence/mean": 0.05})
        prl(*fine_tune, "--compute.device", "cuda", *BFLOAT16, "--output-dir", folder / "sft")
        prl(*fine_tune, "--compute.device", "cuda", *BFLOAT16, "--output-dir", folder / "recomputed", "--model.ac")
        check(harness.tensor_digest(folder / "sft/weights/step_40") == harness.tensor_digest(folder / "recomputed/weights/step_40"),
              "weights depend on what is recomputed")
        config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_40", max_async_level=0)
        prl("rl", "@", config, "--output-dir", folder / "rl", "--ckpt", "--trainer.compute.device", "cuda", "--trainer.compute.dtype", "bfloat16")
        rows = harness.metrics(folder / "rl")
        worst = max(abs(rows[step]["mismatch_kl/all/max"]) for step in range(1, 11))
        check(worst == 0, f"sampler and trainer differ: mismatch_kl {worst}")
        check(len({rows[step]["loss/mean"] for step in range(1, 11)}) > 3, "losses say nothing")


def check_training_plan(sizes):
    with harness.workspace("gpu-plan") as folder:
        # Some steps on demonstrations, or all rewards would be equal.
        prl("init-model", folder / "base", *sizes)
        prl("sft", "--model.name", folder / "base", "--data.name", harness.sft_data(folder / "data.jsonl", 512), "--data.seq-len", 1024,
            "--data.batch-size", 8, "--max-steps", 60, "--optim.lr", "3e-4", "--ckpt.weights-only", "--output-dir", folder / "sft")
        model = folder / "sft/weights/step_60"
        config = harness.rl_config(folder / "rl.toml", model, max_steps=20, seq_len=2048, max_async_level=1)
        out, errors = prl("rl", "@", config, "--output-dir", folder / "out", "--trainer.compute.device", "cuda",
                          "--orchestrator.batch-size", 64, "--orchestrator.group-size", 8, "--inference.max-num-seqs", 256,
                          "--inference.model.max-model-len", 1024, "--trainer.optim.lr", "2e-6")
        log = out + errors + (folder / "out/logs/latest/rl.log").read_text()
        found = re.search(r"memory: ([\d.]+) GiB planned, ([\d.]+) GiB at the peak", log)
        check(found, f"no line about memory: {log[-3000:]}")
        planned, peak = float(found[1]), float(found[2])
        print(f"      {planned} GiB planned, {peak} GiB at the peak; {re.search(r'memory plan: (.*)', log)[1]}")
        check(abs(planned - peak) <= 0.05 * peak, f"the plan of {planned} GiB is more than 5% from the peak of {peak} GiB")
        check("probe_diff=0" in log, "no proof of the weight updates")


def test_a_real_size_stays_within_its_memory_plan():
    needs_gpu()
    for sizes in (QWEN3_06B, QWEN35):
        check_training_plan(sizes)


def check_engine_share(sizes):
    with harness.workspace("gpu-engine") as folder:
        prl("init-model", folder / "base", *sizes)
        answers = []
        for steps in ((), ("--model.enforce-eager",)):
            port, log = harness.free_port(), folder / f"server-{len(answers)}.log"
            with harness.running("inference", "--model.name", folder / "base", "--server.port", port, "--model.max-model-len", 4096,
                                 "--gpu-memory-utilization", 0.25, *steps, log=log) as server:
                harness.wait_until(lambda: harness.is_healthy(port), 60, "the server")
                check(harness.request(port, "POST", "/reload_weights", {})[0] == 200, "the weights were not loaded again")
                status, reply = harness.request(port, "POST", "/v1/completions",
                                                {"prompt": "A word", "max_tokens": 64, "n": 32, "seed": 5, "logprobs": 1, "ignore_eos": True})
                check(status == 200, f"{status}: {reply}")
                answers.append([c["logprobs"]["token_logprobs"] for c in reply["choices"]])
                server.send_signal(signal.SIGINT)
                server.wait(60)
            text = log.read_text()
            found = re.search(r"memory: ([\d.]+) GiB planned, ([\d.]+) GiB at the peak of the engine", text)
            check(found, f"no line about memory: {text[-3000:]}")
            planned, peak = float(found[1]), float(found[2])
            print(f"      {planned} GiB planned, {peak} GiB at the peak; {re.search(r'memory plan: (.*)', text)[1]}")
            check(abs(planned - peak) <= 0.05 * peak, f"the plan of {planned} GiB is more than 5% from the peak of {peak} GiB")
        check(len(set(map(tuple, answers[0]))) == 32, "choices of one request are alike")
        check(answers[0] == answers[1], "recorded steps and steps kernel by kernel differ")


def test_an_engine_alone_stays_within_its_share():
    needs_gpu()
    for sizes in (QWEN3_06B, QWEN35):
        check_engine_share(sizes)


def test_steps_ahead_count_what_they_have_not_seen():
    """Penalties of a step that is queued before the last one's tokens are known; a stop string has each step wait for them."""
    needs_gpu()
    with harness.workspace("gpu-edits") as folder:
        model = harness.tiny_model(folder / "model")
        body = {"prompt": "A word", "max_tokens": 96, "n": 24, "seed": 5, "logprobs": 1, "min_tokens": 40, "repetition_penalty": 1.2,
                "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"40": 3, "41": -3}, "temperature": 0.8}
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--server.port", port, "--model.max-model-len", 256,
                             log=folder / "server.log"):
            harness.wait_until(lambda: harness.is_healthy(port), 60, "the server")
            replies = []
            for more in ({}, {"stop": ["no such text comes"]}, {"repetition_penalty": 1}):
                status, reply = harness.request(port, "POST", "/v1/completions", {**body, **more})
                check(status == 200, f"{status}: {reply}")
                replies.append([(c["text"], c["logprobs"]["token_logprobs"]) for c in reply["choices"]])
        check(replies[0] == replies[1], "steps that were queued ahead drew other tokens")
        check(replies[0] != replies[2], "repetition changes nothing")
        lengths = [len(logprobs) for _, logprobs in replies[0]]
        check(min(lengths) >= 40, f"an answer ended before min_tokens: {lengths}")


harness.main(test_fine_tuning_agrees_with_the_cpu, test_policy_steps_agree_with_the_cpu, test_lock_step_repeats_and_matches_exactly,
             test_lock_step_of_an_adapter_matches_exactly, test_a_mixture_of_experts_matches_exactly, test_experts_by_scores_match_exactly,
             test_a_real_size_stays_within_its_memory_plan, test_an_engine_alone_stays_within_its_share, test_steps_ahead_count_what_they_have_not_seen)
