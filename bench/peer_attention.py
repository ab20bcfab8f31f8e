#!/usr/bin/env python3
"""PyTorch's attention at the shapes of the attention benchmark of ops/cuda: medians over groups of calls, causal half counted."""
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def milliseconds(work, rounds=16, group=5):
    times = []
    for i in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(group):
            work()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / group)
    return statistics.median(times)


def tensor(*shape, grad=False):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def train(name, hq, hkv, d, sequences, length):
    q, k, v = (tensor(sequences, h, length, d, grad=True) for h in (hq, hkv, hkv))
    flops = 2.0 * hq * d * sequences * length * length
    with sdpa_kernel(BACKENDS[name]):
        call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=hq != hkv)
        with torch.no_grad():
            forward = milliseconds(call)
        out = call()
        dout = torch.randn_like(out)
        backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    print(f"{name:6} train  Hq {hq:2} Hkv {hkv:2} D {d:3}  {sequences:3} x {length:6}   forward {forward:8.3f} ms {flops / forward * 1e-9:6.1f} TFLOP/s"
          f"   backward {backward:8.3f} ms {2.5 * flops / backward * 1e-9:6.1f} TFLOP/s")


def decode(name, hq, hkv, d, sequences, context):
    q, k, v = tensor(sequences, hq, 1, d), tensor(sequences, hkv, context, d), tensor(sequences, hkv, context, d)
    with sdpa_kernel(BACKENDS[name]), torch.no_grad():
        ms = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=hq != hkv))
    print(f"{name:6} decode Hq {hq:2} Hkv {hkv:2} D {d:3}  {sequences:3} x {context:6}   {ms * 1e3:8.1f} us {k.nbytes * 2 / ms * 1e-6:6.0f} GB/s")


def main():
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name in BACKENDS:
        for shape in ((16, 8, 128, 1, 16384), (16, 8, 128, 1, 8192), (32, 8, 128, 1, 8192), (16, 8, 128, 16, 1024), (16, 16, 64, 1, 16384),
                      (8, 8, 256, 1, 8192)):
            try:
                train(name, *shape)
            except RuntimeError as e:
                print(f"{name:6} train  {shape}: {str(e).splitlines()[0][:100]}")
        for shape in ((16, 8, 128, 128, 1024), (16, 8, 128, 1, 1024), (16, 8, 128, 1, 16384)):
            try:
                decode(name, *shape)
            except RuntimeError as e:
                print(f"{name:6} decode {shape}: {str(e).splitlines()[0][:100]}")


if __name__ == "__main__":
    sys.exit(main())
