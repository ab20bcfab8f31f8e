#!/usr/bin/env python3
"""Conversations whose keys and values do not all fit the device's cache, with and without `kv_cache_offload`, in turns, as a Markdown table.

    python3 bench/kv_offload.py [--prl build/release/bin/prl] [--shape qwen3-0.6b] [--sessions 64] [--turns 4] [--device cuda]

Sessions as in fleet.py, all at once. The cache holds `--cache-share` of what all of them have at the end, so that a session's earlier turns have mostly left it when
the next one comes; host memory holds all. Both engines are on the same device and serve in turns, each repeat with sessions of its own; the ratio is that of a repeat's two
measurements.
"""
import argparse
import contextlib
import json
import os
import pathlib
import statistics
import tempfile

import fleet
import models

BLOCK = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prl", default="build/release/bin/prl")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(models.SHAPES))
    parser.add_argument("--model", help="folder of the model, made when it is missing (default: in a temporary one)")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first-tokens", type=int, default=2048)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--cache-share", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.prl = os.path.abspath(options.prl)
    longest = options.first_tokens + options.turns * (options.answer_tokens + options.new_tokens)
    with tempfile.TemporaryDirectory(prefix="prl-offload-") as scratch, contextlib.ExitStack() as stack:
        folder = pathlib.Path(scratch)
        options.model = models.ensure_model(options.prl, os.path.abspath(options.model or folder / "model"), options.shape)
        shape = json.loads(pathlib.Path(options.model, "config.json").read_text())
        options.vocab = min(shape["vocab_size"], 100_000)
        blocks = int(options.cache_share * options.sessions * longest / BLOCK)
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        bytes_of_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * (2 if options.device == "cuda" else 4)
        offload = ["--kv-cache-offload.type", "native", "--kv-cache-offload.cpu.num-bytes", 2 * options.sessions * longest * bytes_of_token]
        ports = {}
        for name, flags in {"without": [], "with": offload}.items():
            ports[name], log = fleet.free_port(), folder / f"{name}.log"
            words = [options.prl, "inference", "--model.name", options.model, "--server.port", ports[name], "--model.max-model-len", longest + 64,
                     "--max-num-seqs", options.max_num_seqs, "--kv.block-size", BLOCK, "--kv.num-blocks", blocks, "--gpu-memory-utilization", 0.45,
                     "--compute.device", options.device, *flags]
            fleet.wait_ready(stack.enter_context(fleet.started(words, log)), ports[name], log)
        print(f"{options.shape}, {options.sessions} sessions of {options.turns} turns, prompts of {options.first_tokens} to {longest - options.answer_tokens - options.new_tokens} "
              f"tokens, answers of {options.answer_tokens}; {blocks * BLOCK} tokens in the cache\n", flush=True)
        for port in ports.values():
            fleet.measure(port, [port], options, "warm-up")
        found = {name: [] for name in ports}
        for repeat in range(options.repeats):
            for name in list(ports)[::1 if repeat % 2 == 0 else -1]:
                found[name].append(fleet.measure(ports[name], [ports[name]], options, repeat))
        print("| offload | tokens/s | prefix hits |\n|---|---|---|")
        for name, measured in found.items():
            rates, hits = [rate for rate, _ in measured], [share for _, share in measured]
            print(f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | {100 * statistics.median(hits):.1f}% |")
        ratios = [one[0] / other[0] for one, other in zip(found["with"], found["without"])]
        print(f"\nwith / without: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
