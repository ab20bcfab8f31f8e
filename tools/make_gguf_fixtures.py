#!/usr/bin/env python3
"""Makes tests/fixtures/gguf: small GGUF files and what the Python package `gguf` reads from them.

    python3 tools/make_gguf_fixtures.py        needs gguf, numpy, safetensors, torch

  quants.gguf         per type T a tensor "T" of random blocks and "T.expected", its values in F32 by gguf.quants.dequantize
  tiny_llama.gguf     a random llama of mixed types with a tokenizer; tiny_llama.safetensors holds the weights a conversion must give
  <golden>.gguf       models of tests/golden/models; the conversion must give their weights back
"""
import json
import pathlib

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/fixtures/gguf"
BLOCKS = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
# Byte ranges of the fp16 scales of a block; random bits there could be infinite or NaN.
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def random_blocks(rng, kind, rows, blocks_per_row):
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows * blocks_per_row, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (rng.standard_normal(len(data)) * 10.0 ** rng.integers(-4, 2, len(data))).astype(np.float16)
        data[:, at:at + 2] = halves[:, None].view(np.uint8)
    return data.reshape(rows, blocks_per_row * size)


def make_quants():
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(OUT / "quants.gguf", "test")
    writer.add_uint8("test.u8", 200)
    writer.add_int16("test.i16", -300)
    writer.add_uint64("test.u64", 1 << 40)
    writer.add_float32("test.f32", 1.5)
    writer.add_float64("test.f64", -2.25)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "Grüße")
    writer.add_array("test.strings", ["a", "", "ccc"])
    writer.add_array("test.ints", [3, -1, 2])
    for kind in BLOCKS:
        elements, _ = gguf.GGML_QUANT_SIZES[kind]
        data = random_blocks(rng, kind, 3, 2)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        writer.add_tensor(kind.name + ".expected", gguf.quants.dequantize(data, kind).reshape(3, 2 * elements))
    plain = rng.standard_normal((2, 5)).astype(np.float32)
    half = plain.astype(np.float16)
    writer.add_tensor("F32", plain)
    writer.add_tensor("F16", half)
    writer.add_tensor("F16.expected", half.astype(np.float32))
    bits = rng.integers(0, 0x7F00, (2, 5), dtype=np.uint16)
    writer.add_tensor("BF16", bits.view(np.uint8), raw_dtype=T.BF16)
    writer.add_tensor("BF16.expected", (bits.astype(np.uint32) << 16).view(np.float32))
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(weight, heads):
    """What the exporter of llama models does to q and k: halves of a head become neighbouring rows."""
    rest = weight.shape[1:]
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight, heads):
    rest = weight.shape[1:]
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2).reshape(weight.shape)


LAYER = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name):
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER[stem]}.{kind}"


def add_shape(writer, c):
    heads = c["num_attention_heads"]
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = c.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(head_dim)
    return heads, c["num_key_value_heads"], head_dim, rope


def llama3_factors(head_dim, rope):
    """The factors by which the exporter divides each frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def make_golden(name, architecture):
    folder = ROOT / "tests/golden/models" / name
    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", architecture)
    heads, kv_heads, head_dim, rope = add_shape(writer, c)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(head_dim, rope))
    for shard in sorted(folder.glob("model*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for key in tensors.keys():
                value = tensors.get_tensor(key)
                if architecture == "llama" and (".q_proj." in key or ".k_proj." in key):
                    value = permute(value, heads if ".q_proj." in key else kv_heads)
                if value.dtype == torch.bfloat16:
                    bits = value.contiguous().view(torch.uint16).numpy()
                    writer.add_tensor(gguf_name(key), bits.view(np.uint8), raw_dtype=T.BF16)
                else:
                    writer.add_tensor(gguf_name(key), np.ascontiguousarray(value.numpy()))
    finish(writer)


def byte_alphabet():
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def make_tiny_llama():
    rng = np.random.default_rng(11)
    c = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=512, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 10000.0})
    alphabet = byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [alphabet[b] for b in sorted(alphabet)]
    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a"]
    tokens += [m.replace(" ", "") for m in merges] + ["<think>", "[PAD0]", "[PAD1]"]
    kinds = [3, 3, 3] + [1] * (256 + len(merges)) + [4, 5, 5]
    writer = gguf.GGUFWriter(OUT / "tiny_llama.gguf", "llama")
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    heads, kv_heads, head_dim, _ = add_shape(writer, c)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    hidden, wide = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (len(tokens), hidden), "model.norm.weight": (hidden,)}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {p + "self_attn.q_proj.weight": (heads * head_dim, hidden), p + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
                   p + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden), p + "self_attn.o_proj.weight": (hidden, heads * head_dim),
                   p + "mlp.gate_proj.weight": (wide, hidden), p + "mlp.up_proj.weight": (wide, hidden),
                   p + "mlp.down_proj.weight": (hidden, wide), p + "input_layernorm.weight": (hidden,),
                   p + "post_attention_layernorm.weight": (hidden,)}
    stored = {"token_embd": T.Q8_0, "attn_q": T.Q4_1, "attn_k": T.Q8_0, "attn_v": T.Q5_0, "attn_output": T.Q4_0, "ffn_gate": T.Q5_1,
              "ffn_up": T.F16, "ffn_down": T.Q8_0}
    expected = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape).astype(np.float32) * (0.1 if len(shape) == 2 else 0.05) + (0 if len(shape) == 2 else 1)
        value = value.astype(np.float32)
        target = gguf_name(name)
        kind = stored.get(target.split(".")[-2], T.F32)
        count = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
        if count:
            value = permute(value, count)
        if kind == T.F32:
            writer.add_tensor(target, value)
        elif kind == T.F16:
            writer.add_tensor(target, value.astype(np.float16))
            value = value.astype(np.float16).astype(np.float32)
        else:
            data = gguf.quants.quantize(value, kind)
            writer.add_tensor(target, data, raw_dtype=kind)
            value = gguf.quants.dequantize(data, kind).reshape(shape)
        expected[name] = np.ascontiguousarray(unpermute(value, count) if count else value)
    finish(writer)
    save_file(expected, OUT / "tiny_llama.safetensors")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    make_quants()
    make_tiny_llama()
    make_golden("llama_rope3_sharded", "llama")
    make_golden("qwen2_untied", "qwen2")
    make_golden("qwen3_tied", "qwen3")
    for file in sorted(OUT.iterdir()):
        print(file.name, file.stat().st_size)
