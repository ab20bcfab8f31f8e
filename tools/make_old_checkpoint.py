#!/usr/bin/env python3
"""Writes tests/fixtures/old_checkpoint: a trainer checkpoint of three ranks in the layout of builds in which each rank owned one run of the
whole array of masters, whatever tensors it crossed. Builds of today give each rank a part of every layer; they must read both.

    tools/make_old_checkpoint.py [FOLDER]

Values follow from an element's place i in the array: master i / 64, exp_avg -i / 128, exp_avg_sq i / 256, all exact in fp32. The manifest is
left to the test, which knows the checksum.
"""
import json
import pathlib
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_RANKS = 3
VOCAB, HIDDEN, INTERMEDIATE, HEAD = 16, 8, 8, 16  # qwen3, one layer, one head, not tied
ALIGNMENT = 16  # elements at which a block begins
STATES = {"": 1 / 64, ".exp_avg": -1 / 128, ".exp_avg_sq": 1 / 256}

LAYER = "model.layers.0."
# Tensors that share a block lie one below the other.
VECTORS = [[(LAYER + "input_layernorm.weight", [HIDDEN])], [(LAYER + "self_attn.q_norm.weight", [HEAD])],
           [(LAYER + "self_attn.k_norm.weight", [HEAD])], [(LAYER + "post_attention_layernorm.weight", [HIDDEN])],
           [("model.norm.weight", [HIDDEN])]]
MATRICES = [[("model.embed_tokens.weight", [VOCAB, HIDDEN])],
            [(LAYER + f"self_attn.{x}_proj.weight", [HEAD, HIDDEN]) for x in "qkv"],
            [(LAYER + "self_attn.o_proj.weight", [HIDDEN, HEAD])],
            [(LAYER + f"mlp.{x}_proj.weight", [INTERMEDIATE, HIDDEN]) for x in ("gate", "up")],
            [(LAYER + "mlp.down_proj.weight", [HIDDEN, INTERMEDIATE])],
            [("lm_head.weight", [VOCAB, HIDDEN])]]


def size(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def place():
    """([(name, shape, offset)], [where the array may be divided], its length)."""
    tensors, cuts, at = [], [0], 0
    for blocks in (VECTORS, MATRICES):
        for block in blocks:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            if blocks is MATRICES:
                cuts.append(at)
            for name, shape in block:
                tensors.append((name, shape, at))
                at += size(shape)
    return tensors, sorted({*cuts, at}), at


def safetensors(tensors, metadata):
    """`tensors`: [(name, [values])] of vectors in fp32."""
    header, data = {"__metadata__": metadata}, b""
    for name, values in tensors:
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/fixtures/old_checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    tensors, cuts, length = place()
    firsts = []
    for rank in range(NUM_RANKS):
        nearest = min(cuts, key=lambda cut: abs(cut - length * rank // NUM_RANKS))
        firsts.append(max(nearest, firsts[-1] if firsts else 0))
    parts = [{"file": f"rank_{rank}.safetensors", "begin": begin, "end": end}
             for rank, (begin, end) in enumerate(zip(firsts, firsts[1:] + [length]))]
    for part in parts:
        stored = []
        for name, shape, offset in tensors:
            begin, end = max(offset, part["begin"]), min(offset + size(shape), part["end"])
            stored += [(name + state, [i * factor for i in range(begin, end)]) for state, factor in STATES.items() if begin < end]
        (folder / part["file"]).write_bytes(safetensors(stored, {"type": "adamw"}))
    layout = {"format": "prl-state", "version": 1, "parts": parts,
              "tensors": [{"name": name, "shape": shape, "offset": offset} for name, shape, offset in tensors]}
    (folder / "layout.json").write_text(json.dumps(layout) + "\n")
    progress = {"step": 2, "total_tokens": 640, "total_samples": 20, "num_optimizer_steps": 2, "num_scheduled": 2, "data_position": 20,
                "optimizer_type": "adamw"}
    (folder / "progress.json").write_text(json.dumps(progress) + "\n")


if __name__ == "__main__":
    main()
