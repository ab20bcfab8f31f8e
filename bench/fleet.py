#!/usr/bin/env python3
"""1, 2, 4 engines behind `prl router`, one on each GPU: sessions of several turns, as a Markdown table.

    python3 bench/fleet.py [--prl build/release/bin/prl] [--shape qwen3-0.6b] [--engines 1,2] [--sessions 256] [--turns 4]

Each session sends its turns one after the other: the conversation so far as token ids, which grows by the answer and `--new-tokens` others each time, with
X-Session-ID. All sessions run at once; answers have their full length. Tokens/s are the generated ones of all turns over the time from the first request to the
last answer, client included. Prefix hits are the share of prompt tokens that engines found in their caches; the most there can be is what earlier turns of the same session
have in common with a prompt. `direct` asks one engine without the router.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import models  # noqa: E402


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@contextlib.contextmanager
def started(words, log, environment=None):
    with open(log, "wb") as stream:
        process = subprocess.Popen(list(map(str, words)), stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(process, port, log):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(port, "GET", "/health")[0] == 200:
                return
        time.sleep(0.05)
    sys.exit(f"not ready: {pathlib.Path(log).read_text()[-2000:]}")


def counters(ports):
    found = {"queries": 0.0, "hits": 0.0}
    for port in ports:
        for line in ask(port, "GET", "/metrics")[1].decode().splitlines():
            for key in found:
                if line.startswith(f"vllm:prefix_cache_{key}_total"):
                    found[key] += float(line.rsplit(" ", 1)[1])
    return found


def session(port, options, seed, number):
    draw = random.Random(f"{seed} {number}")
    conversation, generated = [draw.randrange(options.vocab) for _ in range(options.first_tokens)], 0
    for _ in range(options.turns):
        status, data = ask(port, "POST", "/v1/completions",
                           {"model": options.model, "prompt": conversation, "max_tokens": options.answer_tokens, "min_tokens": options.answer_tokens,
                            "ignore_eos": True, "temperature": 1.0, "return_token_ids": True}, {"X-Session-ID": f"{seed}-{number}"})
        if status != 200:
            raise RuntimeError(f"{status}: {data[:300]!r}")
        tokens = json.loads(data)["choices"][0]["token_ids"]
        generated += len(tokens)
        conversation += tokens + [draw.randrange(options.vocab) for _ in range(options.new_tokens)]
    return generated


def measure(port, engines, options, seed):
    before, begin = counters(engines), time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.sessions) as pool:
        generated = sum(pool.map(lambda number: session(port, options, seed, number), range(options.sessions)))
    seconds, after = time.perf_counter() - begin, counters(engines)
    return generated / seconds, (after["hits"] - before["hits"]) / max(1.0, after["queries"] - before["queries"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prl", default="build/release/bin/prl")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(models.SHAPES))
    parser.add_argument("--model", help="folder of the model, made when it is missing (default: in a temporary one)")
    parser.add_argument("--engines", default="1,2")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.prl = os.path.abspath(options.prl)
    with tempfile.TemporaryDirectory(prefix="prl-fleet-") as scratch:
        folder = pathlib.Path(scratch)
        options.model = models.ensure_model(options.prl, os.path.abspath(options.model or folder / "model"), options.shape)
        options.vocab = min(json.loads(pathlib.Path(options.model, "config.json").read_text())["vocab_size"], 100_000)
        longest = options.first_tokens + options.turns * (options.answer_tokens + options.new_tokens)
        prompts = [options.first_tokens + turn * (options.answer_tokens + options.new_tokens) for turn in range(options.turns)]
        possible = sum(prompt - options.new_tokens for prompt in prompts[1:]) / sum(prompts)
        print(f"{options.shape}, {options.sessions} sessions of {options.turns} turns, prompts of {prompts[0]} to {prompts[-1]} tokens, answers of {options.answer_tokens}; "
              f"{100 * possible:.1f}% of the prompt tokens were seen before\n")
        print("| engines | tokens/s | of one engine | prefix hits |\n|---|---|---|---|", flush=True)
        one = None
        for count in ("direct", *map(int, options.engines.split(","))):
            with contextlib.ExitStack() as stack:
                ports = []
                for gpu in range(1 if count == "direct" else count):
                    port, log = free_port(), folder / f"engine-{count}-{gpu}.log"
                    words = [options.prl, "inference", "--model.name", options.model, "--server.port", port, "--model.max-model-len", longest + 64,
                             "--max-num-seqs", 256, "--compute.device", options.device]
                    engine = stack.enter_context(started(words, log, {"CUDA_VISIBLE_DEVICES": str(gpu)} if options.device == "cuda" else None))
                    wait_ready(engine, port, log)
                    ports.append(port)
                front = ports[0]
                if count != "direct":
                    front, log = free_port(), folder / f"router-{count}.log"
                    router = stack.enter_context(started([options.prl, "router", "--engines", ",".join(f"http://127.0.0.1:{port}" for port in ports), "--port", front,
                                                          "--output-dir", folder / f"router-{count}"], log))
                    wait_ready(router, front, log)
                measure(front, ports, options, "warm-up")
                found = [measure(front, ports, options, repeat) for repeat in range(options.repeats)]
            rates, hits = [rate for rate, _ in found], [share for _, share in found]
            one = one if one is not None or count == "direct" else statistics.median(rates)
            share = "" if count == "direct" else f"{statistics.median(rates) / one:.2f}"
            print(f"| {count} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | {share} | {100 * statistics.median(hits):.1f}% |", flush=True)


if __name__ == "__main__":
    main()
