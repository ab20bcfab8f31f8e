#!/usr/bin/env python3
"""The peer of bench/ranks.py, a rank of `torchrun`: transformers with PyTorch's FSDP2 on random rows. Rank 0 prints one JSON object.

Parameters and AdamW's moments in fp32, divided among the ranks layer by layer; computed with in bfloat16, gradients reduced in fp32; attention by SDPA.
Gradients of the rows of a step are summed on each rank and reduced in the backward pass of the last one.
"""
import argparse
import json
import os
import time

import torch
import torch.distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peer import SHAPES, make_model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm-up", type=int)
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    model = make_model(arguments.shape, torch.float32, device)
    model.config.use_cache = False
    if arguments.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for step in range(arguments.warm_up + arguments.steps):
        rows = [torch.randint(0, model.config.vocab_size, (1, arguments.seq_len), device=device) for _ in range(arguments.rows)]
        torch.cuda.synchronize()
        torch.distributed.barrier()
        started = time.perf_counter()
        for i, ids in enumerate(rows):
            model.set_requires_gradient_sync(i + 1 == len(rows))
            (model(input_ids=ids, labels=ids).loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        if step >= arguments.warm_up:
            seconds.append(time.perf_counter() - started)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"step": seconds, "peak": [torch.cuda.max_memory_allocated() / 2**30]}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
