#!/usr/bin/env python3
"""How long running requests wait for their next token while long prompts arrive: two engines that do both, and one for prompts with one that decodes, as a
Markdown table.

    python3 bench/disaggregated.py [--prl build/release/bin/prl] [--shape qwen3-0.6b] [--devices 0,1] [--streams 16] [--prompt-tokens 4096]

Both pairs of engines are there all the time, on the same devices, and are measured in turns: `--streams` answers are streamed, and `--per-second` prompts of
`--prompt-tokens` random tokens come with an answer of `--long-answer-tokens`. A gap is the time between two events of a stream, as a client sees it; the first
`--skip` of each stream do not count. The ratio is that of a repeat's two measurements. Without `--devices` all of it runs on the CPU.
"""
import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import socket
import statistics
import tempfile
import threading
import time

import fleet
import models


def stream(port, ids, tokens, seed, gaps, skip):
    """Adds the seconds between the events of a streamed answer to `gaps`; returns those until the first one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        # Tokens, for text waits where a character is not complete.
        body = {"model": "bench", "token_ids": ids, "stream": True,
                "sampling_params": {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "seed": seed}}
        begin = time.monotonic()
        connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read()[:500]}")
        times = []
        for line in reply:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                times.append(time.monotonic())
        if not times:
            raise RuntimeError("a stream without an event")
        gaps += [after - before for before, after in zip(times[skip:], times[skip + 1:])]
        return times[0] - begin
    finally:
        connection.close()


def measure(port, options, name):
    """(gaps of the streams, times to the first token of long prompts) of one load."""
    rng = random.Random(f"disaggregated {name}")
    prompt = lambda n: [rng.randrange(8, options.vocab) for _ in range(n)]  # noqa: E731
    gaps, firsts, problems = [], [], []
    lock = threading.Lock()

    def run(ids, tokens, seed, is_long):
        own = []
        try:
            first = stream(port, ids, tokens, seed, own, options.skip)
        except (OSError, RuntimeError) as error:
            problems.append(str(error))
            return
        with lock:
            (firsts if is_long else gaps).extend([first] if is_long else own)
    threads = [threading.Thread(target=run, args=(prompt(options.stream_prompt_tokens), options.tokens, i, False)) for i in range(options.streams)]
    for thread in threads:
        thread.start()
    long = []
    for i in range(options.long_prompts):
        time.sleep(1 / options.per_second)
        long.append(threading.Thread(target=run, args=(prompt(options.prompt_tokens), options.long_answer_tokens, 1000 + i, True)))
        long[-1].start()
        if not any(thread.is_alive() for thread in threads):
            break
    for thread in threads + long:
        thread.join()
    if problems:
        raise SystemExit(f"{len(problems)} requests failed: {problems[0]}")
    return gaps, firsts


def two_ports():
    """The first of two free ports in a row."""
    for _ in range(100):
        first = fleet.free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as s:
            s.bind(("127.0.0.1", first + 1))
            return first
    raise SystemExit("no two free ports in a row")


def page(port):
    return fleet.ask(port, "GET", "/metrics")[1].decode()


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prl", default="build/release/bin/prl")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(models.SHAPES))
    parser.add_argument("--model", help="folder of the model, made when it is missing (default: in a temporary one)")
    parser.add_argument("--devices", help="two GPUs, as 0,1 (default: the CPU)")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream-prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--long-prompts", type=int, default=16, help="at most")
    parser.add_argument("--long-answer-tokens", type=int, default=16)
    parser.add_argument("--per-second", type=float, default=4.0)
    parser.add_argument("--skip", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", default="", help="more flags of both, as '--max-num-batched-tokens 512'")
    options = parser.parse_args()
    options.prl = os.path.abspath(options.prl)
    with tempfile.TemporaryDirectory(prefix="prl-disaggregated-") as scratch, contextlib.ExitStack() as stack:
        folder = pathlib.Path(scratch)
        options.model = models.ensure_model(options.prl, os.path.abspath(options.model or folder / "model"), options.shape)
        options.vocab = min(json.loads(pathlib.Path(options.model, "config.json").read_text())["vocab_size"], 100_000)
        if options.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.devices
        ports, pages = {}, {}
        for name in ("mixed", "split"):
            ports[name], first, log = fleet.free_port(), two_ports(), folder / f"{name}.log"
            pair = ["--parallel.dp", 2, "--backend-port", first] if name == "mixed" else \
                   ["--deployment.type", "disaggregated", "--deployment.prefill-port", first, "--deployment.decode-port", first + 1, "--kv-transfer.port", 0]
            words = [options.prl, "inference", "--model.name", options.model, "--model.served-name", "bench", "--server.port", ports[name], "--output-dir",
                     folder / name, "--model.max-model-len", options.prompt_tokens + options.tokens + 256, "--gpu-memory-utilization", 0.4,
                     "--compute.device", "cuda" if options.devices else "cpu", *pair, *options.flags.split()]
            fleet.wait_ready(stack.enter_context(fleet.started(words, log)), ports[name], log)
            wait_for_both(ports[name])
            pages[name] = first + 1
        print(f"{options.shape} on {'GPUs ' + options.devices if options.devices else 'the CPU'}, {options.streams} streams of {options.tokens} tokens; prompts of "
              f"{options.prompt_tokens} tokens, {options.per_second:g} a second\n", flush=True)
        for name, port in ports.items():
            measure(port, options, "warm-up")
        found = {name: [] for name in ports}
        for repeat in range(options.repeats):
            for name in list(ports)[::1 if repeat % 2 == 0 else -1]:
                found[name].append(measure(ports[name], options, f"{repeat}"))
        print("| engines | gap p50 | p99 | largest | long prompt: first token p50 | largest |\n|---|---|---|---|---|---|")
        for name, measured in found.items():
            gaps, firsts = [g for m in measured for g in m[0]], [f for m in measured for f in m[1]]
            cells = [quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps), quantile(firsts, 0.5), max(firsts)]
            print(f"| {name} | " + " | ".join(f"{1000 * cell:,.1f} ms" for cell in cells) + " |")
        for share in (0.5, 0.99):
            ratios = [quantile(split[0], share) / quantile(mixed[0], share) for mixed, split in zip(found["mixed"], found["split"])]
            print(f"\ngap p{100 * share:g}, split / mixed: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
        text = page(pages["split"])
        for what in ("transfers", "transfer_fallbacks", "transfer_bytes", "transfer_seconds"):
            print(f"{what}:", re.search(rf"^prl:kv_{what}_total\{{.*\}} (.*)$", text, re.M)[1], flush=True)


def wait_for_both(port):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if page(port).count('prl_router:engine_ready{') == 2 and len(re.findall(r"^prl_router:engine_ready\{.*\} 1$", page(port), re.M)) == 2:
            return
        time.sleep(0.2)
    raise SystemExit("two engines were not ready in 600 s")


if __name__ == "__main__":
    main()
