#!/usr/bin/env python3
"""Holds a model folder served by `prl inference` against Hugging Face transformers on the same folder.

    python3 tests/conformance/against_transformers.py MODEL_FOLDER [--prl BINARY] [--tokens 200] [--prompts 20] [--threads N]

Needs torch and transformers; not part of `make test`. Checks, and prints as JSON:
  prompts      token ids of the chat prompts are those of apply_chat_template
  fp32         the same greedy tokens on every prompt (all prompts in one batch on our side; theirs is the likeliest token after each
               prefix of ours, which is greedy decoding as long as they agree); largest and mean difference of log-probabilities
  bf16         mean difference of log-probabilities to transformers in bf16, beside that between bf16 and fp32 within transformers
  perplexity   of the text of LICENSE, fp32, to 4 digits
Exit status 1 if tokens differ, fp32 log-probabilities differ by more than 1e-3, bf16 ones by more than bf16 itself changes them
(with a quarter to spare), or the perplexities differ in the fourth digit.
"""
import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTIONS = [
    "What is the capital of France?", "Explain photosynthesis to a child.", "Write a haiku about winter.",
    "List three uses of copper.", "How do airplanes stay in the air?", "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?", "Describe the water cycle.", "Give me a recipe for pancakes.", "Who wrote Romeo and Juliet?",
    "Write a Python function that reverses a string.", "What are the primary colours?", "Why is the sky blue?",
    "Summarise the plot of Cinderella in two sentences.", "Name five mammals that live in the sea.",
    "What does HTTP stand for, and what is it for?", "How many days are there in a leap year?",
    "Suggest a name for a small grey cat.", "What is the difference between weather and climate?",
    "Grüße aus Köln! Was bedeutet das auf Englisch? 🎉",
]


def progress(line):
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


class Server:
    """`prl inference` on a free port, until the block ends."""

    def __init__(self, prl, folder, dtype, threads):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen([prl, "inference", "--model.name", folder, "--model.dtype", dtype, "--server.port", str(self.port),
                                         "--max-num-seqs", "32", "--compute.num-threads", str(threads)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            try:
                self.get("/health")
                return self
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"prl inference ended with {self.process.returncode}")
                time.sleep(0.2)
        sys.exit("prl inference did not come up within 600 s")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            return reply.read()

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return json.load(reply)

    def prompt_ids(self, folder, messages):
        reply = self.post("/v1/chat/completions", {"model": folder, "messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True,
                                                   "return_token_ids": True})
        return reply["prompt_token_ids"]

    def generate(self, ids, count, **extra):
        sampling = {"temperature": 0, "max_tokens": count, "min_tokens": count, "ignore_eos": True, "logprobs": 0, **extra}
        reply = self.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
        choice = reply["choices"][0]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], reply.get("prompt_logprobs")


@torch.no_grad()
def judge(model, ids, begin):
    """For ids[begin:], given what is before each: their log-probabilities, and the likeliest tokens."""
    logits = model(torch.tensor([ids])).logits[0, begin - 1:-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]
    return logprobs.tolist(), logits.argmax(-1).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--prl", default=str(ROOT / "build/release/bin/prl"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of either side")
    parser.add_argument("--text", default=str(ROOT / "LICENSE"))
    args = parser.parse_args()
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    load = lambda dtype: transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    report, good = {"model": args.folder, "transformers": transformers.__version__, "torch": torch.__version__}, True

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:args.prompts]]
    wanted = [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
    model = load(torch.float32)
    with Server(args.prl, args.folder, "float32", args.threads) as server:
        prompts = [server.prompt_ids(args.folder, chat) for chat in chats]
        report["prompts"] = {"number": len(prompts), "equal": sum(a == b for a, b in zip(prompts, wanted))}
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            ours = list(pool.map(lambda ids: server.generate(ids, args.tokens), prompts))
        progress(f"fp32: prl continued {len(prompts)} prompts")
        text_ids = tokenizer(pathlib.Path(args.text).read_text(), add_special_tokens=False)["input_ids"][:2000]
        prompt_logprobs = server.generate(text_ids, 1, prompt_logprobs=0)[2]
    same, differences, theirs_full = 0, [], []
    for prompt, (tokens, logprobs, _) in zip(prompts, ours):
        judged, likeliest = judge(model, prompt + tokens, len(prompt))
        same += likeliest == tokens
        if likeliest != tokens:
            progress(f"other token at {next(i for i, (a, b) in enumerate(zip(likeliest, tokens)) if a != b)} after {tokenizer.decode(prompt)!r}")
        differences += [abs(a - b) for a, b in zip(logprobs, judged)]
        theirs_full += judged
    progress(f"fp32: {same} of {len(prompts)} as transformers has them")
    report["fp32"] = {"prompts with equal tokens": same, "tokens each": args.tokens, "largest difference": max(differences),
                      "mean difference": sum(differences) / len(differences)}
    ours_nll = -sum(entry[str(i)]["logprob"] for i, entry in zip(text_ids[1:], prompt_logprobs[1:])) / (len(text_ids) - 1)
    theirs_nll = -sum(judge(model, text_ids, 1)[0]) / (len(text_ids) - 1)
    report["perplexity"] = {"tokens": len(text_ids), "prl": math.exp(ours_nll), "transformers": math.exp(theirs_nll)}
    good &= report["prompts"]["equal"] == len(prompts) and same == len(prompts) and max(differences) < 1e-3
    good &= f"{math.exp(ours_nll):.4g}" == f"{math.exp(theirs_nll):.4g}"

    half = load(torch.bfloat16)
    with Server(args.prl, args.folder, "bfloat16", args.threads) as server:
        forced = []
        for prompt, (tokens, _, _) in zip(prompts, ours):
            ids = prompt + tokens
            entries = server.generate(ids, 1, prompt_logprobs=0)[2]
            forced += [entries[i][str(ids[i])]["logprob"] for i in range(len(prompt), len(ids))]
    progress("bf16: prl judged the same tokens")
    theirs_half = []
    for prompt, (tokens, _, _) in zip(prompts, ours):
        theirs_half += judge(half, prompt + tokens, len(prompt))[0]
    mean = lambda a, b: sum(abs(x - y) for x, y in zip(a, b)) / len(a)
    report["bf16"] = {"prl bf16 to transformers bf16": mean(forced, theirs_half), "transformers bf16 to its fp32": mean(theirs_half, theirs_full),
                      "prl bf16 to transformers fp32": mean(forced, theirs_full)}
    good &= mean(forced, theirs_full) <= 1.25 * mean(theirs_half, theirs_full)
    print(json.dumps(report, indent=2))
    sys.exit(0 if good else 1)


main()
