#!/usr/bin/env python3
"""Seconds from the start of `prl inference` to the first token of a completion, on random weights.

usage: first_token.py PRL MODEL_FOLDER [REPEATS [SHAPE]]; the folder is made when it is missing, of a SHAPE of models.py.
Prints the median and the range.
"""
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time

from models import ensure_model


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
    ensure_model(prl, model, sys.argv[4] if len(sys.argv) > 4 else "smollm2-135m")
    times = [seconds_to_first_token(prl, model) for _ in range(repeats)]
    print(f"start of `prl inference` to first token: median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, {repeats} starts)")


if __name__ == "__main__":
    main()
