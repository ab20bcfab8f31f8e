#!/usr/bin/env python3
"""Makes src/ops/delta_rule_golden.hpp: what Hugging Face transformers computes for the gated delta rule and what stands around it.

    python3 tools/make_delta_rule_golden.py [OUT]

Needs torch and transformers (5 or later); no network. Convolution, rule (in chunks) and gated norm of Qwen 3.5 follow one another in fp32;
gradients are those of sum(dy * y). Inputs come from a formula that src/ops/delta_rule_test.cpp repeats; of each result every so many
elements are kept.
"""
import pathlib
import sys

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

LENGTHS = [70, 5]  # the first crosses a chunk of 64 tokens
M, N, K, D, W = 2, 4, 16, 32, 4
C, V, T = 2 * M * K + N * D, N * D, sum(LENGTHS)
EPS = 1e-6


def values(seed, *shape, scale=1.0):
    """Uniform in [-scale, scale), the same numbers as in the test."""
    u = (torch.arange(torch.Size(shape).numel(), dtype=torch.int64) * 2654435761 + seed * 40503 + 12345) & 0xFFFFFFFF
    u = u ^ (u >> 15)
    u = (u * 2246822519) & 0xFFFFFFFF
    u = u ^ (u >> 13)
    out = (u >> 8).to(torch.float32) * 2.0**-23 - 1.0
    return (out * scale).reshape(shape).requires_grad_()


def layer(x, weight, b, a, rate, bias, gate, norm):
    """One sequence: inputs of the rule, its outputs, what the norm gives."""
    qkv = qwen.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    qkv.retain_grad()
    q, k, v = qkv[None].split([M * K, M * K, V], dim=-1)
    g = -rate.exp() * F.softplus(a[None] + bias)
    out, _ = qwen.torch_chunk_gated_delta_rule(q.reshape(1, -1, M, K), k.reshape(1, -1, M, K), v.reshape(1, -1, N, D), g=g, beta=b[None].sigmoid(),
                                               use_qk_l2norm_in_kernel=True)
    out = out[0].reshape(-1, V)
    out.retain_grad()
    return qkv, out, norm(out.reshape(-1, D), gate.reshape(-1, D)).reshape(-1, V)


def main():
    x, weight, b, a = values(1, T, C, scale=2.0), values(2, C, W), values(3, T, N, scale=2.0), values(4, T, N, scale=2.0)
    rate, bias, gate, dy = values(5, N), values(6, N), values(7, T, V, scale=2.0), values(9, T, V)
    norm = qwen.Qwen3_5RMSNormGated(D, eps=EPS)
    norm.weight.data = values(8, D).detach() + 1.0
    parts, first = [], 0
    for n in LENGTHS:
        rows = slice(first, first + n)
        parts.append(layer(x[rows], weight, b[rows], a[rows], rate, bias, gate[rows], norm))
        first += n
    y = torch.cat([p[2] for p in parts])
    (y * dy.detach()).sum().backward()
    results = {  # name: (values, step)
        "Conv": (torch.cat([p[0] for p in parts]), 97),
        "Rule": (torch.cat([p[1] for p in parts]), 61),
        "Norm": (y, 61),
        "NormDx": (torch.cat([p[1].grad for p in parts]), 61),
        "NormDgate": (gate.grad, 97),
        "NormDw": (norm.weight.grad, 3),
        "RuleDqkv": (torch.cat([p[0].grad for p in parts]), 61),
        "RuleDb": (b.grad, 7),
        "RuleDa": (a.grad, 7),
        "RuleDrate": (rate.grad, 1),
        "RuleDbias": (bias.grad, 1),
        "ConvDx": (x.grad, 97),
        "ConvDweight": (weight.grad, 11),
    }
    lines = ["#pragma once", "", "// Made by tools/make_delta_rule_golden.py, which says what of.", "", "namespace prl::ops::golden {", ""]
    for name, (tensor, step) in results.items():
        kept = tensor.detach().reshape(-1)[::step].tolist()
        lines.append(f"inline constexpr int k{name}Step = {step};")
        lines.append(f"inline constexpr double k{name}[] = {{{', '.join(f'{v:.7g}' for v in kept)}}};")
    lines += ["", "}  // namespace prl::ops::golden", ""]
    default = pathlib.Path(__file__).resolve().parent.parent / "src/ops/delta_rule_golden.hpp"
    (pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default).write_text("\n".join(lines))


main()
