#!/usr/bin/env python3
"""Makes tests/golden/models: tiny random checkpoints and what Hugging Face transformers computes from them.

    python3 tools/make_golden.py [OUT [CASE..]]      (default: tests/golden/models beside this file, or $OUT if set; all cases)

Needs torch, transformers, safetensors and numpy; any machine, no network. Per case one folder with config.json and
weights as `save_pretrained` writes them, and expected.safetensors with, all in fp32 and eager attention:
  ids, cu_seqlens, targets (int32), temperatures, weights (the d loss / d logp of the test), logits [T, V],
  logp [T], entropy [T] (0 where target is -1), loss (mean negative logp at temperature 1), grad.<name> of sum(weights * logp).
"""
import json
import os
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

SEQUENCES = [5, 70, 19]  # the second crosses a tile of 64 keys
TEMPERATURES = [1.0, 1.0, 0.7]

COMMON = dict(vocab_size=80, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
              num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
LONG_ROPE = dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2],
                 long_factor=[1.1, 1.4, 2.0, 3.5, 6.0, 11.0, 19.0, 30.0])

GPT_OSS = dict(tie_word_embeddings=False, head_dim=32, hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
               num_experts_per_tok=2, sliding_window=20, swiglu_limit=2.5,
               rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                                    original_max_position_embeddings=32))

# Linear attention around softmax attention, and experts with a shared one. The gated norm would divide by outputs of linear attention near 0,
# as those of first tokens are, and show rounding alone.
GATED_EXPERTS = dict(rms_norm_eps=0.03, tie_word_embeddings=False, num_hidden_layers=3, num_attention_heads=2, head_dim=64,
                     layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
                     linear_key_head_dim=16, linear_value_head_dim=32, pad_token_id=None, num_experts=6, num_experts_per_tok=2,
                     moe_intermediate_size=24, shared_expert_intermediate_size=16,
                     rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.25))

# State spaces, attention, MLPs and experts, one to a layer; groups of heads that share what they read and write.
NEMOTRON = dict(tie_word_embeddings=False, pad_token_id=None, layer_norm_epsilon=0.3, head_dim=16, intermediate_size=40, mamba_num_heads=4, mamba_head_dim=16,
                ssm_state_size=32, n_groups=2, conv_kernel=4)
NEMOTRON_EXPERTS = NEMOTRON | dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
                                   norm_topk_prob=True, routed_scaling_factor=2.5)

# name: (config class, keys beyond COMMON, stored dtype, shard size or None)
CASES = {
    "llama_tied": ("LlamaConfig", dict(tie_word_embeddings=True), torch.bfloat16, None),
    "llama_rope3_sharded": ("LlamaConfig", dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, eos_token_id=[2, 3]),
                            torch.float32, "60KB"),
    "llama_linear": ("LlamaConfig", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)), torch.float32, None),
    "llama_bias": ("LlamaConfig", dict(tie_word_embeddings=False, attention_bias=True, head_dim=32), torch.float16, None),
    "qwen2_tied": ("Qwen2Config", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
                   torch.bfloat16, None),
    "qwen2_untied": ("Qwen2Config", dict(tie_word_embeddings=False), torch.bfloat16, None),
    "qwen3_tied": ("Qwen3Config", dict(tie_word_embeddings=True, head_dim=32, num_attention_heads=4, num_key_value_heads=2),
                   torch.bfloat16, None),
    "qwen3_moe": ("Qwen3MoeConfig", dict(tie_word_embeddings=False, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                         norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]), torch.bfloat16, None),
    "qwen3_moe_raw": ("Qwen3MoeConfig", dict(tie_word_embeddings=True, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40,
                                             norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[]), torch.float32, None),
    "glm4_moe": ("Glm4MoeConfig", dict(tie_word_embeddings=False, head_dim=32, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
                                       n_shared_experts=2, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5,
                                       first_k_dense_replace=1, use_qk_norm=True, attention_bias=True), torch.bfloat16, None),
    "glm4_moe_plain": ("Glm4MoeConfig", dict(tie_word_embeddings=True, head_dim=32, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
                                           n_shared_experts=1, n_group=3, topk_group=2, norm_topk_prob=False, routed_scaling_factor=2.0,
                                           first_k_dense_replace=1, use_qk_norm=False, attention_bias=False), torch.float32, None),
    "mistral": ("MistralConfig", dict(tie_word_embeddings=False, head_dim=32, sliding_window=256, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
                torch.bfloat16, None),
    "mistral_window": ("MistralConfig", dict(tie_word_embeddings=False, head_dim=16, sliding_window=20), torch.float32, None),
    "qwen2_window": ("Qwen2Config", dict(tie_word_embeddings=False, use_sliding_window=True, sliding_window=33, max_window_layers=1), torch.bfloat16, None),
    "qwen3_window": ("Qwen3Config", dict(tie_word_embeddings=True, head_dim=32, use_sliding_window=True, sliding_window=7,
                                         layer_types=["sliding_attention", "full_attention"]), torch.bfloat16, None),
    # Its default of a padding token would take that row of the embedding out of the gradient.
    "smollm3": ("SmolLM3Config", dict(tie_word_embeddings=True, no_rope_layers=[0, 1], pad_token_id=None), torch.bfloat16, None),
    "mixtral": ("MixtralConfig", dict(tie_word_embeddings=False, head_dim=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
                torch.bfloat16, None),
    # As published files say which part of a head is rotated.
    "minimax_m2": ("MiniMaxM2Config", dict(tie_word_embeddings=False, head_dim=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
                                           num_local_experts=8, num_experts_per_tok=3, rotary_dim=16), torch.bfloat16, None),
    "afmoe": ("AfmoeConfig", dict(tie_word_embeddings=False, num_hidden_layers=3, num_dense_layers=1, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
                                  num_experts=6, num_experts_per_tok=2, num_shared_experts=2, moe_intermediate_size=16, route_scale=2.5, mup_enabled=True,
                                  global_attn_every_n_layers=2, sliding_window=20), torch.bfloat16, None),
    # A tied head reads the embedding as it is.
    "afmoe_tied": ("AfmoeConfig", dict(tie_word_embeddings=True, num_dense_layers=0, head_dim=32, num_experts=6, num_experts_per_tok=3, num_shared_experts=1,
                                       moe_intermediate_size=24, mup_enabled=True, layer_types=["full_attention", "sliding_attention"], sliding_window=256),
                   torch.float32, None),
    "olmo2": ("Olmo2Config", dict(tie_word_embeddings=False, pad_token_id=None, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
                                  rope_parameters=dict(rope_type="default", rope_theta=5e5)), torch.bfloat16, None),
    "olmo2_bias": ("Olmo2Config", dict(tie_word_embeddings=True, pad_token_id=None, attention_bias=True), torch.float32, None),
    # The same base in both kinds of layers, of which one is scaled.
    "olmo3": ("Olmo3Config", dict(tie_word_embeddings=False, pad_token_id=None, num_hidden_layers=3, sliding_window=20,
                                  layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                  rope_parameters=dict(full_attention=dict(rope_type="yarn", rope_theta=5e4, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                                                           original_max_position_embeddings=64, attention_factor=1.1),
                                                       sliding_attention=dict(rope_type="default", rope_theta=5e4))), torch.float32, None),
    "qwen3_yarn": ("Qwen3Config", dict(tie_word_embeddings=False, head_dim=32, rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=8.0, truncate=False,
                                                                                                    original_max_position_embeddings=32)), torch.bfloat16, None),
    "phi3": ("Phi3Config", dict(tie_word_embeddings=False, pad_token_id=None), torch.bfloat16, None),
    # All sequences are longer than the original length, or none is: a run here has one of the two lists of factors.
    "phi3_long": ("Phi3Config", dict(tie_word_embeddings=True, pad_token_id=None, hidden_size=96, rope_parameters=LONG_ROPE | dict(factor=2.0),
                                     original_max_position_embeddings=4), torch.float32, None),
    "phi3_short": ("Phi3Config", dict(tie_word_embeddings=False, pad_token_id=None, hidden_size=96, rope_parameters=LONG_ROPE | dict(factor=4.0),
                                      original_max_position_embeddings=256), torch.float32, None),
    # The gated norm would divide by outputs of linear attention near 0, as those of first tokens are, and show rounding alone.
    "qwen3_5": ("Qwen3_5TextConfig", dict(rms_norm_eps=0.03, tie_word_embeddings=True, num_hidden_layers=3, num_attention_heads=2, head_dim=64,
                                          layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
                                          linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, pad_token_id=None,
                                          rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.25)), torch.bfloat16, None),
    "qwen3_5_equal_heads": ("Qwen3_5TextConfig", dict(rms_norm_eps=0.03, tie_word_embeddings=False, num_attention_heads=2, head_dim=64,
                                                      layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
                                                      linear_key_head_dim=32, linear_value_head_dim=16, linear_conv_kernel_dim=3, pad_token_id=None,
                                                      rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5)), torch.float32, None),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", GATED_EXPERTS | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]), torch.bfloat16, None),
    "qwen3_next": ("Qwen3NextConfig", GATED_EXPERTS | dict(mlp_only_layers=[2]), torch.bfloat16, None),
    # Latent attention: heads that are padded and such that are not, queries with a latent and without, pairs that are neighbours and not.
    "deepseek_v3": ("DeepseekV3Config", dict(tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32,
                                             kv_lora_rank=24, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=8, num_experts_per_tok=3,
                                             moe_intermediate_size=16, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1, norm_topk_prob=True,
                                             num_nextn_predict_layers=0, routed_scaling_factor=2.5, rms_norm_eps=1e-5,
                                             rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                                                                  mscale_all_dim=1.0, original_max_position_embeddings=32)), torch.bfloat16, None),
    "deepseek_v3_plain": ("DeepseekV3Config", dict(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=32,
                                                   qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=48, n_routed_experts=6, num_experts_per_tok=2,
                                                   moe_intermediate_size=24, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=0,
                                                   norm_topk_prob=False, num_nextn_predict_layers=0, routed_scaling_factor=1.0, rope_interleave=False), torch.float32, None),
    "deepseek_v2": ("DeepseekV2Config", dict(tie_word_embeddings=False, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=24,
                                             qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=6, num_experts_per_tok=2,
                                             moe_intermediate_size=24, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
                                             first_k_dense_replace=1, routed_scaling_factor=1.0,
                                             rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707,
                                                                  mscale_all_dim=0.707, original_max_position_embeddings=64)), torch.bfloat16, None),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", dict(tie_word_embeddings=False, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16,
                                                qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=6, num_experts_per_tok=2,
                                                moe_intermediate_size=24, n_shared_experts=1, mlp_layer_types=["dense", "sparse"],
                                                routed_scaling_factor=1.8), torch.bfloat16, None),
    # Windows by one base, and between them all keys by another, whose positions are stretched.
    "gemma3": ("Gemma3TextConfig", dict(tie_word_embeddings=True, pad_token_id=None, num_hidden_layers=3, head_dim=64, num_attention_heads=2, sliding_window=20,
                                        query_pre_attn_scalar=168, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                                                             sliding_attention=dict(rope_type="default", rope_theta=1e4))), torch.bfloat16, None),
    "gemma3_untied": ("Gemma3TextConfig", dict(tie_word_embeddings=False, pad_token_id=None, head_dim=32, num_attention_heads=4, num_key_value_heads=2,
                                               attention_bias=True, sliding_window=256, query_pre_attn_scalar=32, sliding_window_pattern=2),
                      torch.float32, None),
    # A low limit, so that gates and ups pass it.
    "gpt_oss": ("GptOssConfig", GPT_OSS | dict(num_local_experts=6), torch.bfloat16, None),
    # Experts in MXFP4, as they are published.
    "gpt_oss_mxfp4": ("GptOssConfig", GPT_OSS | dict(num_local_experts=3, num_hidden_layers=1, head_dim=16), torch.bfloat16, None),
    "nemotron_h": ("NemotronHConfig", NEMOTRON | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]), torch.bfloat16, None),
    # Steps that some tokens would have beyond the limits.
    "nemotron_h_experts": ("NemotronHConfig", NEMOTRON_EXPERTS | dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], n_group=4, topk_group=2, routed_scaling_factor=1.5,
                                                                  time_step_limit=[0.25, 2.0]), torch.bfloat16, None),
    "nemotron_h_latent": ("NemotronHConfig", NEMOTRON_EXPERTS | dict(layers_block_type=["linear_attention", "full_attention", "moe"], moe_latent_size=32,
                                                                     use_conv_bias=False), torch.float32, None),
    "qwen3_untied_sharded": ("Qwen3Config", dict(tie_word_embeddings=False, head_dim=16, attention_bias=True), torch.bfloat16, "50KB"),
    # Matrices in FP8, as they are published: of no side a multiple of 128, and sides smaller than that.
    "qwen3_fp8": ("Qwen3Config", dict(tie_word_embeddings=True, hidden_size=136, intermediate_size=144, num_hidden_layers=1, head_dim=32, num_attention_heads=2,
                                      num_key_value_heads=1), torch.float32, None),
    "qwen3_moe_fp8": ("Qwen3MoeConfig", dict(tie_word_embeddings=False, hidden_size=136, num_hidden_layers=1, head_dim=32, num_attention_heads=2,
                                             num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
                                             decoder_sparse_step=1, mlp_only_layers=[]), torch.float32, None),
}

# Cases with matrices in FP8, and the type of their scales: Qwen publishes them in bfloat16, DeepSeek and MiniMax in fp32.
FP8_SCALES = {"qwen3_fp8": torch.bfloat16, "qwen3_moe_fp8": torch.float32}
FP8_BLOCK = 128


# transformers' delta rule in chunks loses digits of the gradients of decays, in fp32 up to 5e-5 of them. Token by token it keeps them.
BY_TOKEN = {"qwen3_5_moe": modeling_qwen3_5_moe, "qwen3_next": modeling_qwen3_next}


def correction_biases(model):
    """Of routers that choose by scores: never trained, and fp32 in every checkpoint."""
    tensors = [*model.named_buffers(), *model.named_parameters()]
    return [tensor for name, tensor in tensors if name.endswith(("e_score_correction_bias", "expert_bias"))]


def adds_one(model, name):
    """Whether a norm multiplies by 1 + weight."""
    return model.config.model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma3_text") and "linear_attn" not in name


def fill(model, generator):
    """Random values everywhere, norms and biases too, so that no gradient or bias is trivially zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_((0.0 if adds_one(model, name) else 1.0) + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(2.0 * noise)
            else:
                parameter.copy_(noise * (0.3 if "embed" in name or "lm_head" in name else 1.2 / parameter.shape[-1] ** 0.5))
        for buffer in correction_biases(model):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


# How checkpoints of a type call what others call by the names on the left.
NUMBERED = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
STORED_NAMES = {"mixtral": NUMBERED, "minimax_m2": NUMBERED, "nemotron_h": {"model.": "backbone."}}


def rows_by_kind(grad, config, kinds):
    """Rows that come key head by key head, each head's of all `kinds` (rows of a key head), with all heads' of one kind together."""
    by_head = grad.unflatten(0, (config.linear_num_key_heads, -1)).split(kinds, dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in by_head])


def in_memory(name, grad, config):
    """Rows in the order in which prl has them where files have another one."""
    if config.model_type != "qwen3_next" or "linear_attn.in_proj_" not in name:
        return grad
    heads = config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, heads * config.linear_value_head_dim
    return rows_by_kind(grad, config, [heads, heads] if name.endswith("in_proj_ba.weight") else [keys, keys, values, values])


def parts_of(name, grad, model_type):
    """Checkpoints hold experts one by one where transformers computes with one tensor of all. Of GPT-OSS, whose do not, parts have names of their
    own, and their matrices the order of outputs and inputs that all others have."""
    prefix, _, kind = name.rpartition(".experts.")
    if model_type == "gpt_oss" and kind in ("gate_up_proj", "down_proj"):
        for expert, both in enumerate(grad):
            yield f"{prefix}.experts.{expert}.{kind}.weight", both.T
        return
    if kind == "gate_up_proj":
        for expert, both in enumerate(grad):
            gate, up = both.chunk(2, dim=0)
            yield f"{prefix}.experts.{expert}.gate_proj.weight", gate
            yield f"{prefix}.experts.{expert}.up_proj.weight", up
    elif kind in ("up_proj", "down_proj"):
        for expert, matrix in enumerate(grad):
            yield f"{prefix}.experts.{expert}.{kind}.weight", matrix
    else:
        yield name, grad


def as_stored(name, grad, model_type):
    """Names and parts of a parameter in checkpoints."""
    for part_name, part in parts_of(name, grad, model_type):
        for own, stored in STORED_NAMES.get(model_type, {}).items():
            part_name = part_name.replace(own, stored)
        yield part_name, part


def quantise_experts(model, generator):
    """Gives experts random blocks of MXFP4, and parameters that are what transformers makes of them. Blocks and scales by their names in files."""
    stored = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                continue
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            parameter.copy_(convert_moe_packed_tensors(blocks, scales))
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
    return stored


def store_quantised(folder, stored):
    """Puts blocks and scales in the place of what they stand for."""
    whole = load_file(str(folder / "model.safetensors"))
    kept = {name: tensor for name, tensor in whole.items() if name + "_blocks" not in stored}
    save_file(kept | stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
                                         quant_method="mxfp4")
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    return {name: tensor for name, tensor in whole.items() if name not in kept}


def quantise_fp8(weight, scale_type):
    """Codes of E4M3, a scale for each block, and what transformers makes of them."""
    rows, cols = weight.shape
    down, across = -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)
    padded = torch.nn.functional.pad(weight, (0, across * FP8_BLOCK - cols, 0, down * FP8_BLOCK - rows))
    largest = padded.reshape(down, FP8_BLOCK, across, FP8_BLOCK).abs().amax(dim=(1, 3))
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).to(scale_type)
    of_element = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    codes = (padded / of_element).to(torch.float8_e4m3fn)
    # transformers takes the size of blocks from the number of scales, so that it is right for whole blocks alone.
    dequantised = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(dequantised, codes.float() * of_element)
    return codes[:rows, :cols].contiguous(), scales, dequantised[:rows, :cols].contiguous()


def round_to_fp8(folder, scale_type):
    """Gives the projections of a folder in fp32 the values of FP8, and all else those of bfloat16. Tensors as they are published, by name."""
    whole, stored = {}, {}
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor.bfloat16()
            whole[name] = stored[name].float()
            continue
        stored[name], stored[name + "_scale_inv"], whole[name] = quantise_fp8(tensor, scale_type)
    save_file(whole, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return stored


def store_fp8(folder, stored):
    """Puts codes and scales in the place of what they stand for, which is what remains of them."""
    whole = load_file(str(folder / "model.safetensors"))
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    config["quantization_config"] = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[FP8_BLOCK, FP8_BLOCK],
                                         modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"])
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    return {name: whole[name] for name in stored if name + "_scale_inv" in stored}


def store_stacks(folder):
    """Experts as Qwen 3.5 is published: transformers writes those of a model for text one by one."""
    tensors = load_file(str(folder / "model.safetensors"))
    experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    stacked = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for prefix in sorted({name.partition(".experts.")[0] + ".experts." for name in experts}):
        count = sum(name.startswith(prefix) and name.endswith(".down_proj.weight") for name in experts)
        of = lambda expert, kind: experts[f"{prefix}{expert}.{kind}_proj.weight"]
        stacked[prefix + "gate_up_proj"] = torch.stack([torch.cat([of(e, "gate"), of(e, "up")]) for e in range(count)])
        stacked[prefix + "down_proj"] = torch.stack([of(e, "down") for e in range(count)])
    save_file(stacked, str(folder / "model.safetensors"), metadata={"format": "pt"})


def take_step_limits(model):
    """transformers limits the steps of a prompt by `time_step_min`, with which models begin, and those of decoding not at all. The models' publisher and
    all that trained them limit them by `time_step_limit`."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)


def make_case(name, out):
    class_name, extra, stored, shard = CASES[name]
    without = ("intermediate_size",) if name == "qwen3_5_moe" else ()  # it has no dense layer
    if name.startswith("nemotron_h"):
        without = ("num_hidden_layers", "rms_norm_eps")
    config = getattr(transformers, class_name)(**{key: value for key, value in (COMMON | extra).items() if key not in without})
    config._attn_implementation = "eager"
    if name in BY_TOKEN:
        BY_TOKEN[name].torch_chunk_gated_delta_rule = BY_TOKEN[name].torch_recurrent_gated_delta_rule
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model, generator)
    biases = [bias.clone() for bias in correction_biases(model)]
    model = model.to(stored)
    for bias, kept in zip(correction_biases(model), biases):
        bias.data = kept
    blocks = quantise_experts(model, generator) if name == "gpt_oss_mxfp4" else {}
    folder = out / name
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    if name == "qwen3_5_moe":
        store_stacks(folder)
    fp8 = round_to_fp8(folder, FP8_SCALES[name]) if name in FP8_SCALES else {}
    # Loaded again rather than widened: a cast model has lost bits of its rotary frequencies too.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    take_step_limits(model)

    total = sum(SEQUENCES)
    ids = torch.randint(0, config.vocab_size, (total,), generator=generator)
    weights = torch.randn(total, generator=generator) / total
    targets = torch.full((total,), -1)
    logits, temperatures, cu_seqlens = [], [], [0]
    for length, temperature in zip(SEQUENCES, TEMPERATURES):
        begin = cu_seqlens[-1]
        targets[begin:begin + length - 1] = ids[begin + 1:begin + length]
        logits.append(model(ids[None, begin:begin + length]).logits[0])
        temperatures += [temperature] * length
        cu_seqlens.append(begin + length)
    logits = torch.cat(logits)
    temperatures = torch.tensor(temperatures)
    valid = targets >= 0
    log_softmax = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    logp = torch.where(valid, log_softmax.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    entropy = torch.where(valid, -(log_softmax.exp() * log_softmax).sum(-1), 0.0)
    loss = torch.nn.functional.cross_entropy(logits[valid], targets[valid])
    weights = torch.where(valid, weights, 0.0)
    (weights * logp).sum().backward()

    tensors = dict(ids=ids.int(), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32), targets=targets.int(),
                   temperatures=temperatures, weights=weights, logits=logits, logp=logp, entropy=entropy, loss=loss.reshape(1))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("expert_bias"):  # nothing depends on it but a choice
            continue
        for stored_name, grad in as_stored(parameter_name, parameter.grad, config.model_type):
            tensors["grad." + stored_name] = in_memory(stored_name, grad, config)
    if blocks:
        tensors |= {"dequantised." + key: value for key, value in store_quantised(folder, blocks).items()}
    if fp8:
        dequantised = store_fp8(folder, fp8)
        tensors |= {"dequantised." + key: value for key, value in dequantised.items()}
        tensors["e4m3"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        tensors |= {"rounded." + key: value.bfloat16() for key, value in dequantised.items() if key.endswith("down_proj.weight")}
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, str(folder / "expected.safetensors"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, loss {loss.item():.6f}")


def main():
    default = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "models"
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", default))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = sys.argv[2:] or list(CASES)
    for name in names:
        make_case(name, out)
    # A case made later may be of other versions than the rest.
    known = json.loads((out / "versions.json").read_text()) if (out / "versions.json").exists() else {}
    known |= {name: dict(torch=torch.__version__, transformers=transformers.__version__) for name in names}
    (out / "versions.json").write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
