#!/usr/bin/env python3
"""Drives a running server with the official openai package, as a user of it would.

    tests/integration/openai_client/run.py                      starts `prl inference` on a tiny random model
    tests/integration/openai_client/run.py --base-url URL --model NAME [--api-key KEY]    uses a server that runs already

Needs the packages of requirements.txt; run outside of such an environment it makes one with make_venv.sh and starts again there.
"""
import argparse
import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

try:
    import openai
except ImportError:
    if os.environ.get("PRL_CLIENT_VENV"):
        raise
    VENV = HERE.parents[2] / "build/openai-client-venv"
    if "--skip-without-package" in sys.argv and not (VENV / ".requirements").exists():
        print("skipped: the openai package is not here; tests/integration/openai_client/make_venv.sh installs it")
        sys.exit(77)
    python = subprocess.run([str(HERE / "make_venv.sh")], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    os.environ["PRL_CLIENT_VENV"] = "1"
    os.execv(python, [python, *sys.argv])

import harness  # noqa: E402
from harness import check  # noqa: E402

MESSAGES = [{"role": "user", "content": "Say something, wörld 😀"}]


class Target:
    """The server under test."""

    def __init__(self, base_url, model, api_key):
        self.base_url, self.model, self.api_key = base_url, model, api_key
        self.client = self.make(openai.OpenAI)

    def make(self, kind, **overrides):
        return kind(**{"base_url": self.base_url, "api_key": self.api_key, "timeout": 60, "max_retries": 0, **overrides})

    def chat(self, **arguments):
        return self.client.chat.completions.create(**{"model": self.model, "messages": MESSAGES, "max_tokens": 24, **arguments})

    def complete(self, **arguments):
        return self.client.completions.create(**{"model": self.model, "prompt": "Once upon a time", "max_tokens": 24, **arguments})

    def metric(self, name):
        import urllib.request
        root = self.base_url.removesuffix("/v1")
        with urllib.request.urlopen(f"{root}/metrics", timeout=10) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(name + "{"):
                    return float(line.rsplit(" ", 1)[1])
        raise harness.Failure(f"/metrics does not have {name}")

    def is_idle(self):
        return self.metric("vllm:num_requests_running") == 0 and self.metric("vllm:num_requests_waiting") == 0


def models(t):
    ids = [model.id for model in t.client.models.list()]
    check(t.model in ids, f"{t.model} is not among {ids}")
    check(t.client.models.retrieve(t.model).id == t.model, "retrieve gives another model")


def chat(t):
    reply = t.chat(seed=1)
    check(reply.object == "chat.completion" and reply.id.startswith("chatcmpl-"), f"not a completion: {reply}")
    check(reply.choices[0].message.role == "assistant", "the role is wrong")
    check(isinstance(reply.choices[0].message.content, str), "no content")
    check(reply.choices[0].finish_reason in ("stop", "length"), f"finish_reason {reply.choices[0].finish_reason}")
    usage = reply.usage
    check(0 < usage.completion_tokens <= 24 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"usage {usage}")


def streaming(t):
    whole = t.chat(seed=3, temperature=1.0)
    text, finish, usage, role = "", None, None, None
    for chunk in t.chat(seed=3, temperature=1.0, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            usage = chunk.usage
            continue
        role = role or chunk.choices[0].delta.role
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    check(role == "assistant", "the first chunk has no role")
    check(text == whole.choices[0].message.content, f"streamed {text!r}, whole {whole.choices[0].message.content!r}")
    check(finish == whole.choices[0].finish_reason, "finish reasons differ")
    check(usage is not None and usage.completion_tokens == whole.usage.completion_tokens, f"usage {usage}")


def completions(t):
    reply = t.complete(seed=4, n=2, logprobs=3, echo=False)
    check(len(reply.choices) == 2, "two choices were asked for")
    for choice in reply.choices:
        count = len(choice.logprobs.tokens)
        check(count == len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset), "lists differ in length")
        check(all(value <= 0 for value in choice.logprobs.token_logprobs), "a log-probability is positive")
    check(reply.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in reply.choices), "usage does not count the tokens")
    text = "".join(chunk.choices[0].text for chunk in t.complete(seed=4, stream=True))
    check(text == reply.choices[0].text, "streamed text differs")
    several = t.complete(prompt=["one", "two", "three"], max_tokens=3)
    check([choice.index for choice in several.choices] == [0, 1, 2], "one choice per prompt")


def logprobs(t):
    reply = t.chat(temperature=0, logprobs=True, top_logprobs=5, extra_body={"return_token_ids": True})
    choice = reply.choices[0]
    entries = choice.logprobs.content
    check(len(entries) == reply.usage.completion_tokens == len(choice.token_ids), "one entry per token")
    check(len(reply.prompt_token_ids) == reply.usage.prompt_tokens, "prompt ids and usage differ")
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        check(len(values) == 5 and values == sorted(values, reverse=True), f"top_logprobs {values}")
        check(bytes(entry.bytes).decode("utf-8", "replace") == entry.token, f"bytes and token differ: {entry}")
        check(entry.logprob == values[0], "greedy decoding takes the most likely token")


def choices_and_seeds(t):
    first = t.chat(n=4, seed=11, temperature=1.5)
    again = t.chat(n=4, seed=11, temperature=1.5)
    other = t.chat(n=4, seed=99, temperature=1.5)
    texts = [choice.message.content for choice in first.choices]
    check([choice.index for choice in first.choices] == [0, 1, 2, 3], "four choices")
    check(texts == [choice.message.content for choice in again.choices], "the same seed gives other texts")
    check(texts != [choice.message.content for choice in other.choices], "another seed gives the same texts")
    check(len(set(texts)) > 1, "all choices are alike")


def stops(t):
    full = t.complete(seed=5, temperature=1.0).choices[0].text
    check(len(full) >= 6, f"the model says too little to test with: {full!r}")
    stop = full[3:5]
    reply = t.complete(seed=5, temperature=1.0, stop=[stop, "\x00never"])
    check(reply.choices[0].text == full[:full.index(stop)], f"{reply.choices[0].text!r} is not {full!r} up to {stop!r}")
    check(reply.choices[0].finish_reason == "stop", "finish_reason is not stop")
    short = t.complete(max_tokens=2, extra_body={"ignore_eos": True})
    check(short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2, "max_tokens was not kept")


def cancellation(t):
    harness.wait_until(t.is_idle, 20, "an idle server")
    endless = {"max_tokens": 100000, "extra_body": {"ignore_eos": True}}
    stream = t.chat(stream=True, **endless)
    next(iter(stream))
    stream.close()
    harness.wait_until(t.is_idle, 10, "the server to notice a closed stream")
    impatient = t.make(openai.OpenAI, timeout=0.3)
    with contextlib.suppress(openai.APITimeoutError):
        impatient.chat.completions.create(model=t.model, messages=MESSAGES, **endless)
    harness.wait_until(t.is_idle, 10, "the server to notice a client that gave up")

    async def drop():
        client = t.make(openai.AsyncOpenAI)
        task = asyncio.create_task(client.chat.completions.create(model=t.model, messages=MESSAGES, **endless))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
    asyncio.run(drop())
    harness.wait_until(t.is_idle, 10, "the server to notice a cancelled task")


def errors(t):
    def expect(kind, status, words, **arguments):
        try:
            t.chat(**arguments)
        except kind as error:
            check(error.status_code == status, f"status {error.status_code}")
            check(words in str(error), f"{words!r} is not in {error}")
            return error
        raise harness.Failure(f"{arguments} was accepted")
    error = expect(openai.BadRequestError, 400, "temperature", temperature=17)
    check(error.param == "temperature", f"param {error.param}")
    expect(openai.BadRequestError, 400, "messages", messages=[])
    expect(openai.NotFoundError, 404, "no-such-model", model="no-such-model")
    expect(openai.BadRequestError, 400, "maximum context length is", messages=[{"role": "user", "content": "word " * 200000}])
    if t.api_key != "EMPTY":
        try:
            t.make(openai.OpenAI, api_key="wrong").models.list()
            raise harness.Failure("a wrong key was accepted")
        except openai.AuthenticationError:
            pass


def concurrency(t):
    async def many():
        async with t.make(openai.AsyncOpenAI) as client:
            calls = [client.chat.completions.create(model=t.model, messages=MESSAGES, max_tokens=8, seed=i) for i in range(64)]
            return await asyncio.gather(*calls)
    replies = asyncio.run(many())
    check(len({reply.id for reply in replies}) == 64, "replies share ids")
    check(all(reply.usage.completion_tokens <= 8 for reply in replies), "max_tokens was not kept")
    alone = t.chat(max_tokens=8, seed=5)
    check(alone.choices[0].message.content == replies[5].choices[0].message.content, "a seed gives another text in a busy batch")


CHECKS = [models, chat, streaming, completions, logprobs, choices_and_seeds, stops, cancellation, errors, concurrency]


def run(target):
    failures = 0
    for function in CHECKS:
        started = time.monotonic()
        try:
            function(target)
            print(f"ok    {function.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except (harness.Failure, openai.OpenAIError, AttributeError, TypeError, ValueError, IndexError) as error:
            failures += 1
            print(f"FAIL  {function.__name__}: {type(error).__name__}: {error}", flush=True)
    print(f"openai {openai.__version__}: {len(CHECKS) - failures} of {len(CHECKS)} checks passed", flush=True)
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--skip-without-package", action="store_true", help="exit with 77 instead of installing the package")
    options = parser.parse_args()
    if options.base_url:
        return run(Target(options.base_url, options.model, options.api_key))
    with harness.workspace("openai-client") as folder:
        model = harness.tiny_model(folder / "model")
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--model.served-name", "tiny", "--server.port", port, "--server.api-key", "secret",
                             cwd=folder, log=folder / "inference.log") as process:
            harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 60, "the server to start")
            check(process.poll() is None, f"the server ended:\n{(folder / 'inference.log').read_text()[-4000:]}")
            return run(Target(f"http://127.0.0.1:{port}/v1", "tiny", "secret"))


if __name__ == "__main__":
    sys.exit(main())
