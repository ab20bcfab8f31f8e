#!/usr/bin/env python3
"""Drives a running server with the official openai package, as a user of it would.

    tests/integration/openai_client/run.py                      starts `prl inference` on a tiny random model
    tests/integration/openai_client/run.py --base-url URL --model NAME [--api-key KEY]    uses a server that runs already

Needs the packages of requirements.txt; run outside of such an environment it makes one and starts again there.
"""
import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import sys
import time
import typing

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import client_venv  # noqa: E402

client_venv.enter("openai-client", "openai", __file__)

import openai  # noqa: E402
import pydantic  # noqa: E402  (a dependency of openai)

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


class Answer(pydantic.BaseModel):
    """Small enough that even a model that knows nothing ends it."""
    colour: typing.Literal["red", "green \"leaf\"", "bläu"]
    count: int = pydantic.Field(ge=-20, le=300)
    share: float | None = pydantic.Field(ge=0, le=1)
    tags: list[typing.Literal["a", "b"]] = pydantic.Field(max_length=3)
    note: str = pydantic.Field(max_length=12)


class Lookup(pydantic.BaseModel):
    """Looks a word up."""
    word: typing.Literal["copper", "zinc"]
    limit: int = pydantic.Field(ge=1, le=5)


LONG = {"max_tokens": 1500}
TOOLS = [openai.pydantic_function_tool(Lookup, name="lookup"),
         {"type": "function", "function": {"name": "stop", "description": "Ends it", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}]


def check_call(call):
    check(call.type == "function" and call.id, f"not a call: {call}")
    check(call.function.name in ("lookup", "stop"), f"an unknown tool: {call}")
    if call.function.name == "lookup":
        Lookup.model_validate_json(call.function.arguments)
    else:
        check(json.loads(call.function.arguments) == {}, f"arguments {call.function.arguments}")


def structured_output(t):
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": Answer.model_json_schema()}}
    for seed in range(6):
        reply = t.client.chat.completions.parse(model=t.model, messages=MESSAGES, response_format=Answer, seed=seed, temperature=1.2, **LONG)
        check(isinstance(reply.choices[0].message.parsed, Answer), f"not parsed: {reply.choices[0].message}")
        check(reply.choices[0].finish_reason == "stop", f"finish_reason {reply.choices[0].finish_reason}")
        Answer.model_validate_json(t.chat(response_format=schema, seed=seed, **LONG).choices[0].message.content)
    for choice in t.complete(n=4, seed=1, extra_body={"guided_json": Answer.model_json_schema()}, **LONG).choices:
        Answer.model_validate_json(choice.text)
    for seed in range(4):
        text = t.chat(seed=seed, extra_body={"structured_outputs": {"regex": r"(GET|PUT) /[a-z]{1,8}\?id=\d{2}"}}, **LONG).choices[0].message.content
        check(re.fullmatch(r"(GET|PUT) /[a-z]{1,8}\?id=\d{2}", text), f"{text!r} does not match")
        text = t.chat(seed=seed, extra_body={"guided_choice": ["one", "two", "drei ä"]}, logprobs=True).choices[0].message.content
        check(text in ("one", "two", "drei ä"), f"{text!r} is not a choice")
    try:
        t.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}})
        raise harness.Failure("uniqueItems was accepted")
    except openai.BadRequestError as error:
        check("uniqueItems" in str(error), f"the keyword is not named: {error}")


def structured_streams(t):
    with t.client.chat.completions.stream(model=t.model, messages=MESSAGES, response_format=Answer, seed=2, **LONG) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    check("content.delta" in kinds and "content.done" in kinds, f"events {kinds}")
    check(isinstance(final.choices[0].message.parsed, Answer), "the stream's end is not parsed")

    async def many():
        async with t.make(openai.AsyncOpenAI) as client:
            calls = [client.chat.completions.parse(model=t.model, messages=MESSAGES, response_format=Answer, seed=i, **LONG) for i in range(16)]
            whole = await asyncio.gather(*calls)
            text = ""
            stream = await client.chat.completions.create(model=t.model, messages=MESSAGES, seed=3, stream=True,
                                                          extra_body={"guided_json": Answer.model_json_schema()}, **LONG)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return whole, text
    whole, text = asyncio.run(many())
    check(all(isinstance(reply.choices[0].message.parsed, Answer) for reply in whole), "an answer is not parsed")
    Answer.model_validate_json(text)


def tools(t):
    free = t.chat(tools=TOOLS, tool_choice="none", seed=1)
    check(not free.choices[0].message.tool_calls, "a call in spite of tool_choice none")
    check(isinstance(t.chat(tools=TOOLS, tool_choice="auto", seed=1).choices[0].message.content, str), "no content")
    for seed in range(4):
        choice = t.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, **LONG).choices[0]
        check(choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, f"not one call: {choice}")
        check_call(choice.message.tool_calls[0])
        parsed = t.client.chat.completions.parse(model=t.model, messages=MESSAGES, tools=TOOLS[:1], seed=seed,
                                                 tool_choice={"type": "function", "function": {"name": "lookup"}}, **LONG)
        check(isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Lookup), f"not parsed: {parsed}")
    calls = {}
    for chunk in t.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=0, stream=True, **LONG):
        for delta in chunk.choices[0].delta.tool_calls or []:
            entry = calls.setdefault(delta.index, {"name": "", "arguments": ""})
            entry["name"] += delta.function.name or ""
            entry["arguments"] += delta.function.arguments or ""
    whole = t.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=0, **LONG).choices[0].message.tool_calls[0].function
    check(calls == {0: {"name": whole.name, "arguments": whole.arguments}}, f"streamed {calls}, whole {whole}")
    # A conversation goes on behind the tool's answer.
    call = t.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1, **LONG).choices[0].message
    messages = [*MESSAGES, call.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "a red metal"}]
    check(t.chat(messages=messages, tools=TOOLS).choices[0].finish_reason in ("stop", "length", "tool_calls"), "no reply behind a tool message")


RESPONSE_TOOLS = [{"type": "function", "name": "lookup", "description": "Looks a word up", "strict": True, "parameters": Lookup.model_json_schema()}]


def responses(t):
    create = lambda **arguments: t.client.responses.create(**{"model": t.model, "input": "Say something", "max_output_tokens": 24, **arguments})
    whole = create(instructions="Be brief", extra_body={"seed": 3})
    check(whole.object == "response" and whole.id.startswith("resp_"), f"not a response: {whole}")
    check(whole.status in ("completed", "incomplete") and isinstance(whole.output_text, str), f"status {whole.status}")
    check((whole.status == "incomplete") == (whole.incomplete_details is not None), f"details {whole.incomplete_details}")
    usage = whole.usage
    check(0 < usage.output_tokens <= 24 and usage.total_tokens == usage.input_tokens + usage.output_tokens, f"usage {usage}")
    text, kinds, last = "", [], None
    for event in create(instructions="Be brief", extra_body={"seed": 3}, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    check(text == whole.output_text, f"streamed {text!r}, whole {whole.output_text!r}")
    check(kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"], f"events {kinds[:6]}")
    check(last.type == f"response.{whole.status}" and last.response.output_text == text, f"the last event is {last}")
    # A conversation goes on by id and by items, and both see the same prompt.
    by_id = create(previous_response_id=whole.id, input="And then?", extra_body={"seed": 4})
    by_items = create(input=[{"role": "user", "content": "Say something"}, *[item.model_dump(exclude_none=True) for item in whole.output],
                             {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]}], extra_body={"seed": 4})
    check(by_id.usage.input_tokens == by_items.usage.input_tokens, f"{by_id.usage} and {by_items.usage}")
    check(by_id.output_text == by_items.output_text, "the same conversation gives two texts")
    for kind, arguments in ((openai.NotFoundError, {"previous_response_id": "resp_unknown"}), (openai.BadRequestError, {"background": True}),
                            (openai.BadRequestError, {"tools": [{"type": "web_search"}]})):
        try:
            create(**arguments)
            raise harness.Failure(f"{arguments} was accepted")
        except kind:
            pass


def responses_tools_and_schemas(t):
    long = {"model": t.model, "input": "Say something", "max_output_tokens": 1500}
    for seed in range(3):
        parsed = t.client.responses.parse(**long, text_format=Answer, extra_body={"seed": seed})
        check(isinstance(parsed.output_parsed, Answer), f"not parsed: {parsed.output}")
        reply = t.client.responses.create(**long, tools=RESPONSE_TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body={"seed": seed})
        calls = [item for item in reply.output if item.type == "function_call"]
        check(len(calls) == 1 and calls[0].name == "lookup", f"not one call: {reply.output}")
        Lookup.model_validate_json(calls[0].arguments)
        arguments, done = "", None
        with t.client.responses.stream(**long, tools=RESPONSE_TOOLS, tool_choice={"type": "function", "name": "lookup"}, extra_body={"seed": seed}) as stream:
            for event in stream:
                arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
                done = event.arguments if event.type == "response.function_call_arguments.done" else done
            final = stream.get_final_response()
        check(arguments == done == final.output[-1].arguments, f"{arguments!r}, {done!r}, {final.output}")
        Lookup.model_validate_json(arguments)
    # The result of a call goes back as an item.
    following = t.client.responses.create(model=t.model, previous_response_id=reply.id, max_output_tokens=8, tools=RESPONSE_TOOLS,
                                          input=[{"type": "function_call_output", "call_id": calls[0].call_id, "output": "a red metal"}])
    check(following.usage.input_tokens > reply.usage.input_tokens, "the call's result did not reach the model")


def fields_of_vllm(t):
    raw = t.client.chat.completions.with_raw_response.create(model=t.model, messages=MESSAGES, max_tokens=4, extra_body={"temprature": 1, "min_p": 0.1})
    check(raw.headers.get("X-Prl-Ignored") == "temprature", f"headers {raw.headers}")
    free = t.complete(seed=5, temperature=1.0, logprobs=0, extra_body={"return_token_ids": True}).choices[0]
    allowed = sorted(set(free.token_ids))[:3]
    drawn = t.complete(seed=5, temperature=1.0, extra_body={"return_token_ids": True, "allowed_token_ids": allowed}).choices[0]
    check(set(drawn.token_ids) <= set(allowed), f"{drawn.token_ids} is not among {allowed}")
    words = {text: token for text, token in zip(free.logprobs.tokens, free.token_ids) if text and text == text.strip() and text.isascii() and text.isprintable()}
    kept = t.complete(seed=5, temperature=1.0, n=4, extra_body={"bad_words": list(words), "return_token_ids": True}).choices
    check(words and not any(token in choice.token_ids for choice in kept for token in words.values()), f"one of {words} came: {kept}")
    try:
        t.chat(extra_body={"use_beam_search": True})
        raise harness.Failure("use_beam_search was accepted")
    except openai.BadRequestError as error:
        check("use_beam_search" in str(error), f"the field is not named: {error}")
    as_ids = {"return_tokens_as_token_ids": True}
    likeliest = t.complete(seed=5, temperature=1.0, logprobs=5, extra_body=as_ids).choices[0].logprobs
    wanted = [name for name in likeliest.top_logprobs[0]][-2:]
    named = {"logprob_token_ids": [int(name.split(":")[1]) for name in wanted]} | as_ids
    told = t.complete(seed=5, temperature=1.0, logprobs=0, extra_body=named).choices[0].logprobs
    check(told.tokens == likeliest.tokens, "naming tokens changed what was drawn")
    check(all(told.top_logprobs[0][name] == likeliest.top_logprobs[0][name] for name in wanted), f"{told.top_logprobs[0]} {likeliest.top_logprobs[0]}")
    try:
        t.client.embeddings.create(model=t.model, input="x")
        raise harness.Failure("embeddings were made")
    except openai.NotFoundError as error:
        check("/v1/embeddings" in str(error), f"the route is not named: {error}")
    grammar = 'root ::= "a" [0-9]{2} ("," "b")*'
    text = t.chat(seed=1, extra_body={"guided_grammar": grammar}, **LONG).choices[0].message.content
    check(re.fullmatch(r"a[0-9]{2}(,b)*", text), f"{text!r} does not follow the grammar")


CHECKS = [models, chat, streaming, completions, logprobs, choices_and_seeds, stops, cancellation, errors, concurrency, structured_output,
          structured_streams, tools, responses, responses_tools_and_schemas, fields_of_vllm]


def run(target):
    failures = 0
    for function in CHECKS:
        started = time.monotonic()
        try:
            function(target)
            print(f"ok    {function.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except (harness.Failure, openai.OpenAIError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
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
                             "--model.tool-call-parser", "hermes",
                             cwd=folder, log=folder / "inference.log") as process:
            harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 60, "the server to start")
            check(process.poll() is None, f"the server ended:\n{(folder / 'inference.log').read_text()[-4000:]}")
            return run(Target(f"http://127.0.0.1:{port}/v1", "tiny", "secret"))


if __name__ == "__main__":
    sys.exit(main())
