#!/usr/bin/env python3
"""Seconds from the start of `prl inference` to the first token of a completion, on random weights.

usage: first_token.py PRL MODEL_FOLDER [REPEATS [SHAPE]]; the folder is made when it is missing, of SHAPE smollm2-135m or qwen3-0.6b. Prints every repeat and the median.
"""
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time


SHAPES = {
    "smollm2-135m": "--family llama --vocab-size 49152 --hidden-size 576 --intermediate-size 1536 --num-layers 30 --num-heads 9 "
                    "--num-kv-heads 3 --max-position-embeddings 8192",
    "qwen3-0.6b": "--family qwen3 --vocab-size 151936 --hidden-size 1024 --intermediate-size 3072 --num-layers 28 --num-heads 16 "
                  "--num-kv-heads 8 --head-dim 128 --max-position-embeddings 40960",
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def seconds_to_first_token(prl, model):
    port = free_port()
    started = time.perf_counter()
    server = subprocess.Popen([prl, "inference", "--model.name", model, "--server.port", str(port), "--log.level", "warning"])
    try:
        while time.perf_counter() - started < 120:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/v1/completions", json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}),
                                   {"Content-Type": "application/json"})
                reply = connection.getresponse()
                body = reply.read()
            except ConnectionRefusedError:
                time.sleep(0.005)
                continue
            if reply.status != 200:
                sys.exit(f"first_token: status {reply.status}: {body[:200]!r}")
            return time.perf_counter() - started
        sys.exit("first_token: no answer within 120 s")
    finally:
        server.kill()
        server.wait()


def main():
    prl, model = sys.argv[1], os.path.abspath(sys.argv[2])
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    if not os.path.exists(os.path.join(model, "config.json")):
        shape = SHAPES[sys.argv[4] if len(sys.argv) > 4 else "smollm2-135m"]
        subprocess.run([prl, "init-model", "--output-dir", model, "--dtype", "bfloat16", *shape.split()], check=True)
    times = [seconds_to_first_token(prl, model) for _ in range(repeats)]
    print(f"start of `prl inference` to first token: median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, {repeats} starts)")


if __name__ == "__main__":
    main()
