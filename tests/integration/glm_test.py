#!/usr/bin/env python3
"""GLM-4.5 (glm4_moe) from nothing to a server: dense layers before sparse ones, shared experts, a router whose bias nothing trains or rounds."""
import json
import os
import random
import struct

import harness
from harness import check, prl

STEPS = 5
GLM = ["--family", "glm4_moe", "--num-experts", 8, "--num-experts-per-tok", 2, "--moe-intermediate-size", 48, "--num-kv-heads", 4, "--head-dim", 32]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def read_tensors(path):
    """Name -> type, shape, bytes."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return {name: (at["dtype"], at["shape"], data[end + at["data_offsets"][0]:end + at["data_offsets"][1]])
            for name, at in header.items() if name != "__metadata__"}


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def prepare(folder):
    """A model as published: the bias has bits that bfloat16 has not, and a layer for multi-token prediction lies behind the others."""
    model = harness.tiny_model(folder / "model", *GLM)
    tensors = read_tensors(model / "model.safetensors")
    check(tensors[BIAS] == ("F32", [8], bytes(32)), f"a fresh bias: {tensors[BIAS]}")
    rng = random.Random(3)
    tensors[BIAS] = ("F32", [8], struct.pack("<8f", *(rng.gauss(0, 0.1) for _ in range(8))))
    tensors["model.layers.2.eh_proj.weight"] = ("F32", [1, 2], bytes(8))
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = ("F32", [1, 2], bytes(8))
    write_tensors(model / "model.safetensors", tensors)
    config = json.loads((model / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (model / "config.json").write_text(json.dumps(config))
    harness.sft_data(folder / "data.jsonl", 256)
    return tensors[BIAS]


def fine_tune(folder, out, *flags, steps=STEPS):
    log = prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
                 "--max-steps", steps, "--optim.lr", "5e-3", "--output-dir", folder / out, "--ckpt", *flags)
    return harness.tensor_digest(folder / out / f"weights/step_{steps}"), "".join(log)


def saved(folder, out, step):
    tensors = {}
    for path in (folder / out / f"weights/step_{step}").glob("model*.safetensors"):
        tensors |= read_tensors(path)
    return tensors


def test_fine_tuning_keeps_the_bias_and_gives_the_weights_of_one_rank():
    with harness.workspace("glm-sft") as folder:
        bias = prepare(folder)
        before = read_tensors(folder / "model/model.safetensors")
        for dtype in ("float32", "bfloat16"):
            of_dtype = ["--compute.dtype", dtype, "--optim.weight-decay", "0.1"]
            one, _ = fine_tune(folder, f"{dtype}-1", *of_dtype)
            ways = {"recomputed": ["--model.ac"], "gathered": ["--deployment.num-gpus", 2, "--model.reshard-after-forward"]}
            if dtype == "float32":
                ways["two-ranks"] = ["--deployment.num-gpus", 2]
                ways["some-recomputed"] = ["--model.ac.mode", "selective", "--model.ac.targets", "norm,routed_experts"]
            for name, flags in ways.items():
                check(fine_tune(folder, f"{dtype}-{name}", *of_dtype, *flags)[0] == one, f"{dtype}, {name}: other weights than one rank")
            after = saved(folder, f"{dtype}-1", STEPS)
            check(after[BIAS] == bias, f"{dtype}: the bias was {bias}, is {after[BIAS]}")
            # The head for multi-token prediction is not trained, and kept.
            head = {name for name in before if name.startswith("model.layers.2.")}
            unchanged = {name for name in after if after[name][2] == before[name][2]}
            check(unchanged == {BIAS} | head, f"{dtype}: trained, and unchanged all the same: {unchanged}")
            check(after.keys() == before.keys(), f"{dtype}: tensors {after.keys() ^ before.keys()}")
            config = json.loads((folder / f"{dtype}-1/weights/step_{STEPS}/config.json").read_text())
            check(config["num_nextn_predict_layers"] == 1, "config.json does not name a layer that is there")
        rows = harness.metrics(folder / "float32-1")
        check(all(0 < rows[step]["routing_confidence/mean"] <= 1 for step in range(1, STEPS + 1)), f"how experts are used: {rows[STEPS]}")
        fine_tune(folder, "resumed", "--compute.dtype", "float32", "--optim.weight-decay", "0.1", steps=2)
        check(fine_tune(folder, "resumed", "--compute.dtype", "float32", "--optim.weight-decay", "0.1", "--ckpt.resume-step", -1)[0]
              == harness.tensor_digest(folder / f"float32-1/weights/step_{STEPS}"), "a resumed run has other weights")


def test_rl_in_lock_step():
    with harness.workspace("glm-rl") as folder:
        bias = prepare(folder)
        fine_tune(folder, "sft", steps=60)
        config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_60", max_async_level=0, max_steps=4)
        bfloat16 = ["--trainer.compute.dtype", "bfloat16"]
        ports = harness.free_ports(2)
        several = ["--deployment.type", "single_node", "--deployment.num-train-gpus", 2, "--trainer-gpu-ids", "[0, 1]", "--inference-gpu-ids", "[0]",
                   "--inference.server.port", ports[0], "--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[1]]
        for name, flags in {"one": [], "several": several, "adapter": ["--trainer.model.lora.rank", 4]}.items():
            prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", *bfloat16, *flags)
            rows = harness.metrics(folder / name)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, 5)), f"{name}: sampler and trainer disagree")
            check(any(rows[step]["optim/grad_norm"] > 0 for step in range(1, 5)), f"{name}: nothing was trained")
            check(saved(folder, name, 4)[BIAS] == bias, f"{name}: another bias")
        digests = [harness.tensor_digest(folder / name / "weights/step_4") for name in ("one", "several")]
        check(digests[0] == digests[1], "two trainer ranks and a server gave other weights than one process")


def test_adapters_of_all_blocks_and_what_is_merged():
    with harness.workspace("glm-lora") as folder:
        bias = prepare(folder)
        lora = ["--model.lora.rank", 4, "--model.lora.alpha", 16, "--optim.lr", "2e-2", "--ckpt.weights.save-adapter-separately"]
        one, _ = fine_tune(folder, "one", *lora)
        check(fine_tune(folder, "two", *lora, "--deployment.num-gpus", 2)[0] == one, "two ranks trained another adapter than one")
        path = next((folder / "one").rglob("adapter_model.safetensors"))
        names = read_tensors(path).keys()
        for module in ("layers.0.mlp.down_proj", "layers.1.mlp.shared_experts.gate_proj", "layers.1.mlp.experts.7.up_proj", "layers.1.self_attn.v_proj"):
            check(f"base_model.model.model.{module}.lora_B.weight" in names, f"no adapter of {module}: {sorted(names)[:8]}")
        check(not any(".mlp.gate." in name for name in names), "an adapter of the router")
        # The adapter's file names its base by a checksum, which counts the bias.
        prl("convert", folder / "model", folder / "merged", "--adapter", path.parent, "--dtype", "bfloat16")
        merged = read_tensors(folder / "merged/model.safetensors")
        check(merged[BIAS] == bias and merged["model.norm.weight"][0] == "BF16", f"converted: {merged[BIAS]}")
        tensors = read_tensors(folder / "model/model.safetensors")
        values = list(struct.unpack("<8f", bias[2]))
        values[3] += 1e-6
        tensors[BIAS] = ("F32", [8], struct.pack("<8f", *values))
        write_tensors(folder / "model/model.safetensors", tensors)
        _, errors = prl("convert", folder / "model", folder / "refused", "--adapter", path.parent, expect=None)
        check("trained on another base model" in errors, f"another bias is another base: {errors}")


def test_configurations_that_are_not_built_are_refused():
    with harness.workspace("glm-refused") as folder:
        prepare(folder)
        config = json.loads((folder / "model/config.json").read_text())
        for key, value in {"partial_rotary_factor": 0.3, "n_group": 3, "attention_dropout": 0.1, "first_k_dense_replace": 2}.items():
            (folder / "model/config.json").write_text(json.dumps({**config, key: value}))
            _, errors = prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--output-dir", folder / "out", expect=None)
            check(f"'{key}'" in errors, f"{key} = {value}: {errors}")
        (folder / "model/config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
        _, errors = prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--output-dir", folder / "out", expect=None)
        check("'model.layers.2.eh_proj.weight' is no part" in errors, f"a layer that config.json does not name: {errors}")


if __name__ == "__main__":
    harness.main(test_fine_tuning_keeps_the_bias_and_gives_the_weights_of_one_rank, test_rl_in_lock_step, test_adapters_of_all_blocks_and_what_is_merged,
                 test_configurations_that_are_not_built_are_refused)
