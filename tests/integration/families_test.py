#!/usr/bin/env python3
"""Mixtral, MiniMax-M2, AFMoE, OLMo 2, Gemma 3, Phi-3, GPT-OSS, Qwen 3.5, Qwen3-Next and Nemotron-H from nothing to RL in lock-step, with their files' own names of tensors and modules."""
import json
import os

import harness
from harness import check, prl

STEPS = 4
# What init-model is told, the modules that take adapters, and tensors of a layer that other families have under other names or not at all.
FAMILIES = {
    "mixtral": (["--num-experts", 6, "--num-experts-per-tok", 2], ["q_proj", "k_proj", "v_proj", "o_proj", "experts"],
                ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.5.w1.weight", "block_sparse_moe.experts.0.w3.weight"]),
    "minimax_m2": (["--num-experts", 6, "--num-experts-per-tok", 2], ["q_proj", "k_proj", "v_proj", "o_proj", "experts"],
                   ["self_attn.q_norm.weight", "block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias",
                    "block_sparse_moe.experts.5.w1.weight"]),
    # A dense layer with a window, then one with experts, full attention and no rotation. Its heads' gates share their name with those of MLPs.
    "afmoe": (["--num-experts", 6, "--num-experts-per-tok", 2, "--sliding-window", 12],
              ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
              ["self_attn.gate_proj.weight", "pre_mlp_layernorm.weight", "post_mlp_layernorm.weight", "mlp.router.gate.weight", "mlp.expert_bias",
               "mlp.shared_experts.up_proj.weight", "mlp.experts.5.down_proj.weight"]),
    # A dense layer, then one with experts; latents of queries, and of keys and values.
    "deepseek_v3": (["--num-experts", 6, "--num-experts-per-tok", 2],
                    ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                    ["self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight", "self_attn.kv_b_proj.weight", "mlp.gate.e_score_correction_bias",
                     "mlp.shared_experts.up_proj.weight", "mlp.experts.5.down_proj.weight"]),
    "olmo2": ([], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
              ["self_attn.q_norm.weight", "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"]),
    # A layer with a window, then one of full attention by another rotary base.
    "gemma3": (["--sliding-window", 12], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
               ["self_attn.q_norm.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]),
    "gpt_oss": (["--num-experts", 6, "--num-experts-per-tok", 2, "--sliding-window", 12], ["q_proj", "k_proj", "v_proj", "o_proj"],
                ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias"]),
    "phi3": ([], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"]),
    # Two layers: one of linear attention, and the last one of softmax attention.
    "qwen3_5": (["--head-dim", 64], ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                                     "up_proj", "down_proj"], ["self_attn.q_norm.weight", "self_attn.q_proj.weight"]),
    # And experts beside a shared one, of which the shared one is adapted.
    "qwen3_next": (["--head-dim", 64, "--num-experts", 6, "--num-experts-per-tok", 2],
                   ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "shared_expert"],
                   ["self_attn.q_norm.weight", "mlp.gate.weight", "mlp.experts.5.up_proj.weight", "mlp.shared_expert.down_proj.weight",
                    "mlp.shared_expert_gate.weight"]),
    # A layer of each kind: a state space, attention, experts and a dense MLP.
    "nemotron_h": (["--num-layers", 4, "--num-experts", 6, "--num-experts-per-tok", 2, "--moe-intermediate-size", 32],
                   ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "experts"],
                   ["norm.weight", "mixer.gate.e_score_correction_bias", "mixer.experts.5.up_proj.weight", "mixer.shared_experts.down_proj.weight"]),
}
SHARED = ("minimax_m2", "deepseek_v3", "qwen3_next", "nemotron_h")  # by two devices of an engine; the others are in sharded_runner_test.cpp
LAYERS = {"nemotron_h": "backbone.layers.2"}  # where those tensors are, of others "model.layers.1"
MODEL_TYPES = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def names_in(path):
    data = path.read_bytes()
    return set(json.loads(data[8:8 + int.from_bytes(data[:8], "little")])) - {"__metadata__"}


def prepare(folder, family):
    harness.tiny_model(folder / "model", "--family", family, *FAMILIES[family][0])
    harness.sft_data(folder / "data.jsonl", 256)


def fine_tune(folder, out, *flags, steps=STEPS):
    prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4, "--max-steps", steps,
        "--optim.lr", "5e-3", "--output-dir", folder / out, "--ckpt", *flags)
    return harness.tensor_digest(folder / out / f"weights/step_{steps}")


def lora(section, family, *flags):
    return [f"--{section}.lora.rank", 4, f"--{section}.lora.target-modules", json.dumps(FAMILIES[family][1]), *flags]


def test_fine_tuning_gives_the_weights_of_one_rank_in_files_of_the_family():
    for family, (_, _, tensors) in FAMILIES.items():
        with harness.workspace(f"family-sft-{family}") as folder:
            prepare(folder, family)
            one = fine_tune(folder, "one")
            check(one != harness.tensor_digest(folder / "model"), f"{family}: nothing was trained")
            for name, flags in {"recomputed": ["--model.ac"], "gathered": ["--deployment.num-gpus", 2, "--model.reshard-after-forward"]}.items():
                check(fine_tune(folder, name, *flags) == one, f"{family}, {name}: other weights than one rank")
            saved = folder / f"one/weights/step_{STEPS}"
            names = set().union(*(names_in(path) for path in saved.glob("model*.safetensors")))
            check(names == names_in(folder / "model/model.safetensors"), f"{family}: other tensors than before: {names}")
            check(names >= {f"{LAYERS.get(family, 'model.layers.1')}.{tensor}" for tensor in tensors}, f"{family}: names of tensors: {sorted(names)}")
            check(json.loads((saved / "config.json").read_text())["model_type"] == MODEL_TYPES.get(family, family), f"{family}: another config.json")


def test_rl_in_lock_step():
    for family in FAMILIES:
        with harness.workspace(f"family-rl-{family}") as folder:
            prepare(folder, family)
            fine_tune(folder, "sft", steps=60)
            config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_60", max_async_level=0, max_steps=2)
            ways = {"whole": [], "adapter": lora("trainer.model", family)}
            if family in SHARED:
                ways["shared"] = ["--deployment.type", "single_node", "--inference.parallel.tp", 2, "--inference.server.port", harness.free_port()]
            for name, flags in ways.items():
                prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", "--trainer.compute.dtype", "bfloat16", *flags)
                rows = harness.metrics(folder / name)
                check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in (1, 2)), f"{family}, {name}: sampler and trainer disagree")
                check(any(rows[step]["optim/grad_norm"] > 0 for step in (1, 2)), f"{family}, {name}: nothing was trained")
                if name == "shared":
                    trained = [harness.tensor_digest(folder / each / "weights/step_2") for each in ("whole", name)]
                    check(trained[0] == trained[1], f"{family}: an engine on two devices gave other weights")


def test_adapters_have_the_names_of_the_familys_modules():
    for family, (_, targets, _) in FAMILIES.items():
        with harness.workspace(f"family-lora-{family}") as folder:
            prepare(folder, family)
            merged = fine_tune(folder, "one", *lora("model", family, "--ckpt.weights.save-adapter-separately", "--optim.lr", "2e-2", "--compute.dtype", "float32"))
            adapter = next((folder / "one").rglob("adapter_model.safetensors"))
            config = json.loads((adapter.parent / "adapter_config.json").read_text())
            if family not in ("mixtral", "minimax_m2", "qwen3_next", "afmoe", "deepseek_v3", "nemotron_h"):  # whose experts are named one by one, and so is the shared one
                check(sorted(config["target_modules"]) == sorted(targets), f"{family}: {config['target_modules']}")
            prl("convert", folder / "model", folder / "merged", "--adapter", adapter.parent, "--dtype", "float32")
            check(harness.tensor_digest(folder / "merged") == merged, f"{family}: merged by convert, other weights than the trainer's")
            _, errors = prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--max-steps", 1, "--output-dir", folder / "no",
                            "--model.lora.target-modules", '["query"]', expect=None)
            check("'query' matches no module" in errors and targets[0] in errors, f"{family}: {errors[-1000:]}")


harness.main(test_fine_tuning_gives_the_weights_of_one_rank_in_files_of_the_family, test_rl_in_lock_step, test_adapters_have_the_names_of_the_familys_modules)
