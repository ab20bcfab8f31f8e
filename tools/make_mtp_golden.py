#!/usr/bin/env python3
"""Makes tests/golden/mtp: random heads for multi-token prediction of models in tests/golden/models, and what they compute.

    python3 tools/make_mtp_golden.py [CASE..]      (default: all cases)

transformers has no such heads, so this is the published description (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2) over a decoder of one
layer that transformers has: it is given what the head's projection makes of two norms side by side, the embedding's first, in place of
embeddings, has the head's norm as its last one, and the model's embedding and head. Per case one folder with head.safetensors, the tensors
by the names of published checkpoints, and expected.safetensors, all in fp32: ids (those of the tokens after), hidden [T, H], cu_seqlens,
targets, weights, logits [T, V], logp [T] and grad.<name> of sum(weights * logp).
"""
import copy
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

from make_golden import SEQUENCES, adds_one, as_stored, correction_biases, fill

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
# Keys of the configuration of one layer like that of the head.
CASES = {
    "qwen3_5": dict(layer_types=["full_attention"]),
    "glm4_moe": dict(first_k_dense_replace=0),
    "deepseek_v3": dict(first_k_dense_replace=0),
}


def own_names(case, config):
    """Names in checkpoints, by those in a model of one layer; None for what a head shares with its model."""
    if case == "qwen3_5":
        layer, outside = "mtp.layers.0.", dict(norm="mtp.norm.weight", e="mtp.pre_fc_norm_embedding.weight", h="mtp.pre_fc_norm_hidden.weight", p="mtp.fc.weight")
    else:
        layer = f"model.layers.{config.num_hidden_layers}."
        outside = dict(norm=layer + "shared_head.norm.weight", e=layer + "enorm.weight", h=layer + "hnorm.weight", p=layer + "eh_proj.weight")

    def name_of(name):
        if name == "model.norm.weight":
            return outside["norm"]
        return layer + name.removeprefix("model.layers.0.") if name.startswith("model.layers.0.") else None
    return name_of, outside


def rms_norm(x, weight, eps, is_plus_one):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + 1.0 if is_plus_one else weight)


def make_case(case):
    base = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "models" / case, dtype=torch.float32, attn_implementation="eager")
    config = copy.deepcopy(base.config)
    config.num_hidden_layers = 1
    for key, value in CASES[case].items():
        setattr(config, key, value)
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["sparse"]
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(sum(case.encode()) + 1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill(model, generator)
    H = config.hidden_size
    is_plus_one = adds_one(model, "norm")
    centre = 0.0 if is_plus_one else 1.0
    own = dict(e=centre + 0.2 * torch.randn(H, generator=generator), h=centre + 0.2 * torch.randn(H, generator=generator),
               p=torch.randn(H, 2 * H, generator=generator) * 1.2 / (2 * H) ** 0.5)
    exact = {id(bias) for bias in correction_biases(model)}
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(base.get_input_embeddings().weight)
        model.get_output_embeddings().weight.copy_(base.get_output_embeddings().weight)
        for tensor in [*model.parameters(), *own.values()]:
            if id(tensor) not in exact:
                tensor.copy_(tensor.bfloat16().float())
    own = {key: torch.nn.Parameter(value) for key, value in own.items()}

    name_of, outside = own_names(case, base.config)
    stored = {outside[key]: value.detach().bfloat16() for key, value in own.items()}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        for part_name, part in as_stored(name, parameter, config.model_type):
            if name_of(part_name) is not None and "rotary" not in part_name:
                stored[name_of(part_name)] = part.detach().float() if id(parameter) in exact else part.detach().bfloat16()

    total = sum(SEQUENCES)
    ids = torch.randint(0, config.vocab_size, (total,), generator=generator)
    targets = torch.randint(0, config.vocab_size, (total,), generator=generator)
    hidden = torch.randn(total, H, generator=generator).bfloat16().float()
    weights = torch.randn(total, generator=generator) / total
    logits, cu_seqlens = [], [0]
    for length in SEQUENCES:
        rows = slice(cu_seqlens[-1], cu_seqlens[-1] + length)
        embedded = model.get_input_embeddings()(ids[rows]).detach()
        pair = torch.cat([rms_norm(embedded, own["e"], config.rms_norm_eps, is_plus_one), rms_norm(hidden[rows], own["h"], config.rms_norm_eps, is_plus_one)], dim=-1)
        logits.append(model(inputs_embeds=(pair @ own["p"].T)[None]).logits[0])
        cu_seqlens.append(cu_seqlens[-1] + length)
    logits = torch.cat(logits)
    logp = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    (weights * logp).sum().backward()
    tensors = dict(ids=ids.int(), hidden=hidden, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32), targets=targets.int(), weights=weights,
                   logits=logits, logp=logp)
    tensors |= {"grad." + outside[key]: value.grad for key, value in own.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for part_name, grad in as_stored(name, parameter.grad, config.model_type):
            if name_of(part_name) is not None:
                tensors["grad." + name_of(part_name)] = grad
    folder = GOLDEN / "mtp" / case
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = lambda of: {name: tensor.detach().contiguous() for name, tensor in of.items()}
    save_file(contiguous(stored), str(folder / "head.safetensors"), metadata={"format": "pt"})
    save_file(contiguous(tensors), str(folder / "expected.safetensors"))
    print(f"{case}: {sum(tensor.numel() for tensor in stored.values())} parameters, mean log-probability {logp.mean().item():.6f}")


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in sys.argv[1:] or list(CASES):
        make_case(case)
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    (GOLDEN / "mtp" / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
