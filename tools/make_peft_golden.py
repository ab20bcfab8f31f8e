#!/usr/bin/env python3
"""Makes tests/golden/peft: adapters of tests/golden/models in PEFT's own files, and what `peft` computes with them.

    python3 tools/make_peft_golden.py [OUT]                      (default: tests/golden/peft)
    python3 tools/make_peft_golden.py --check BASE ADAPTER LOGP  compares an adapter written by prl with `peft`, see below

Needs torch, transformers, peft and safetensors; no network. Per case one folder with adapter_config.json and adapter_model.safetensors as
`save_pretrained` writes them, base.txt (the folder below tests/golden/models), and expected.safetensors, all in fp32 and eager attention, over
the ids, sequences, targets, temperatures and weights of the base's expected.safetensors:
  logp [T], grad.<tensor> of sum(weights * logp), and of five AdamW steps (kSteps below) on the mean negative log-probability at temperature 1:
  losses [5] before each step, after.<tensor>.

--check: LOGP is a JSON file {"ids": [...], "logp": [...]}: logp[i] of ids[i] given ids[:i], logp[0] unused, as the prompt_logprobs of a server
that serves ADAPTER on BASE. Prints the largest difference and exits 1 if it is above 2e-4.
"""
import json
import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASES = ROOT / "tests/golden/models"
LR, WEIGHT_DECAY, STEPS = 1e-2, 0.01, 5

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama_all": ("llama_tied", dict(r=4, lora_alpha=8, target_modules=ALL)),
    "qwen2_patterns": ("qwen2_tied", dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"],
                                          rank_pattern={"v_proj": 5, "layers.1.mlp.down_proj": 3}, alpha_pattern={"layers.0.self_attn.q_proj": 9})),
    "qwen3_rslora": ("qwen3_tied", dict(r=8, lora_alpha=16, use_rslora=True, target_modules=["k_proj", "o_proj", "gate_proj"],
                                        alpha_pattern={"^model.layers.1.self_attn.k_proj": 5})),
}


def base_model(folder):
    """The base in fp32. Older transformers do not know rope_parameters, so what it says is said again."""
    config = transformers.AutoConfig.from_pretrained(folder)
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.rope_theta = rope["rope_theta"]
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, torch_dtype=torch.float32, attn_implementation="eager").eval()


def log_probs(model, data, with_temperatures):
    out = []
    cu = data["cu_seqlens"].tolist()
    for begin, end in zip(cu, cu[1:]):
        logits = model(input_ids=data["ids"][None, begin:end].long()).logits[0]
        if with_temperatures:
            logits = logits / data["temperatures"][begin:end, None]
        target = data["targets"][begin:end].long()
        logp = torch.log_softmax(logits, -1).gather(1, target.clamp(min=0)[:, None])[:, 0]
        out.append(torch.where(target >= 0, logp, torch.zeros_like(logp)))
    return torch.cat(out)


def named(model):
    """Trained tensors under the names of the saved file, without the prefix."""
    return {name.removeprefix("base_model.model.").replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}


def make_case(name, out):
    base, options = CASES[name]
    data = load_file(BASES / base / "expected.safetensors")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = peft.get_peft_model(base_model(BASES / base), peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options)).eval()
    with torch.no_grad():
        for parameter in named(model).values():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    folder = out / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "base.txt").write_text(base + "\n")

    expected = {}
    logp = log_probs(model, data, True)
    (data["weights"] * logp).sum().backward()
    expected["logp"] = logp
    for key, parameter in named(model).items():
        expected["grad." + key] = parameter.grad.clone()
    optimizer = torch.optim.AdamW(named(model).values(), lr=LR, weight_decay=WEIGHT_DECAY)
    losses = []
    valid = data["targets"] >= 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = -log_probs(model, data, False)[valid].mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    expected["losses"] = torch.tensor(losses)
    for key, parameter in named(model).items():
        expected["after." + key] = parameter
    save_file({key: value.detach().contiguous() for key, value in expected.items()}, str(folder / "expected.safetensors"))
    print(f"{name}: {sum(p.numel() for p in named(model).values())} trained, losses {losses}")


def check(base, adapter, file):
    """`peft` with an adapter that prl wrote against what prl's server says of it."""
    said = json.loads(pathlib.Path(file).read_text())
    model = peft.PeftModel.from_pretrained(base_model(pathlib.Path(base)), adapter).eval()
    ids = torch.tensor(said["ids"])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
        plain = model.get_base_model()
        with model.disable_adapter():
            without = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    worst = (logp - torch.tensor(said["logp"][1:])).abs().max().item()
    effect = (logp - without).abs().max().item()
    print(f"largest difference of {len(ids) - 1} log-probabilities: {worst:.2e}; the adapter changes them by up to {effect:.2e}")
    sys.exit(worst > 2e-4 or effect < 1e-3)


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--check"]:
        check(*sys.argv[2:])
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/golden/peft"
    for name in CASES:
        make_case(name, out)
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__)
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
