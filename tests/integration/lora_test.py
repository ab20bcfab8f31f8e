#!/usr/bin/env python3
"""Adapters in RL: the engine samples with the adapter that the trainer has, in one process and in several, after a resume too."""
import json
import struct

import harness
from harness import check, prl

LORA = ["--trainer.model.lora.rank", 4, "--trainer.model.lora.alpha", 16, "--trainer.optim.lr", "5e-3"]
SAVE = ["--ckpt", "--ckpt.interval", 2, "--ckpt.weights.save-adapter-separately"]
STEPS = 4


def tensors(path):
    """Names and shapes of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return {name: entry["shape"] for name, entry in json.loads(data[8:8 + size]).items() if name != "__metadata__"}


def run(folder, name, *flags, steps=STEPS):
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
    out = folder / name
    prl("rl", "@", config, "--output-dir", out, *LORA, *SAVE, *flags)
    return out


def check_lock_step(out):
    rows = harness.metrics(out)
    check(set(rows) >= set(range(1, STEPS + 1)), f"steps {sorted(rows)}")
    worst = max(abs(rows[step]["mismatch_kl/all/mean"]) for step in range(1, STEPS + 1))
    check(worst == 0, f"{out.name}: sampler and trainer differ: mismatch_kl {worst}")
    proofs = [json.loads(line) for line in (out / "logs/weight_proofs.jsonl").read_text().splitlines()]
    check(proofs and all(proof["is_proven"] for proof in proofs), f"{proofs}")


def adapter_files(out):
    return harness.digest(out / f"weights/step_{STEPS}/lora_adapters", "*.safetensors")


def test_one_process_and_several_learn_the_same_adapter():
    with harness.workspace("lora") as folder:
        one = run(folder, "one")
        check_lock_step(one)
        adapter = one / f"weights/step_{STEPS}/lora_adapters"
        config = json.loads((adapter / "adapter_config.json").read_text())
        check(config["r"] == 4 and config["lora_alpha"] == 16 and "q_proj" in config["target_modules"], f"{config}")
        names = tensors(adapter / "adapter_model.safetensors")
        check(names["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == [4, 64], f"{names}")
        check(all(".lora_A." in name or ".lora_B." in name for name in names), f"{names}")
        check(len(names) == 2 * 2 * 7, f"{len(names)} tensors of two layers with seven matrices")
        masters = tensors(one / f"checkpoints/step_{STEPS}/trainer/model.safetensors")
        check(all(".lora_" in name for name in masters), f"the checkpoint holds more than the adapter: {masters}")
        merged = harness.digest(one / f"weights/step_{STEPS}", "model*.safetensors")
        check(merged != harness.digest(one / "weights/step_2", "model*.safetensors"), "two steps of training changed nothing")

        several = run(folder, "several", "--deployment.type", "single_node", "--inference.server.port", harness.free_port())
        check_lock_step(several)
        check(adapter_files(several) == adapter_files(one), "one process and several trained different adapters")
        check(harness.digest(several / f"weights/step_{STEPS}", "model*.safetensors") == merged, "the merged models differ")
        broadcasts = sorted(path.name for path in (several / "broadcasts").glob("step_*/*") if path.is_file())
        check("adapter_model.safetensors" in broadcasts and not any(name.startswith("model") for name in broadcasts),
              f"more than the adapter was sent: {broadcasts}")

        first = run(folder, "resumed", steps=2)
        check((first / "weights/step_2/lora_adapters").exists(), "no adapter of step 2")
        again = run(folder, "resumed", "--ckpt.resume-step", -1)
        check(adapter_files(again) == adapter_files(one), "a resumed run trained another adapter")

        # The merged model is the policy: it answers as the run's engine would have.
        prl("eval", "--model.name", one / f"weights/step_{STEPS}", "--env.id", "reverse-text", "--env.args", json.dumps(harness.ENV_ARGS),
            "--num-examples", 4, "--group-size", 1, "--sampling.max-tokens", 48, "--output-dir", folder / "eval")


def test_what_cannot_be_adapted_is_refused_before_the_run():
    with harness.workspace("lora-refused") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1)
        for flags, words in ((["--trainer.model.lora.target-modules", "no_such_proj"], ("no_such_proj", "q_proj")),
                             (["--trainer.model.lora.rank", 4, "--orchestrator.student.model.lora.rank", 8], ("lora.rank", "4")),
                             (["--orchestrator.student.model.lora.rank", 8], ("trainer.model.lora",))):
            _, stderr = prl("rl", "@", config, "--output-dir", folder / "out", *flags, expect=1)
            for word in words:
                check(word in stderr, f"{flags}: the error does not speak of {word}: {stderr[-2000:]}")


if __name__ == "__main__":
    harness.main(test_one_process_and_several_learn_the_same_adapter, test_what_cannot_be_adapted_is_refused_before_the_run)
