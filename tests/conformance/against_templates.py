#!/usr/bin/env python3
"""Holds chat templates and tokenizers, as `prl inference` applies them in /tokenize, against transformers' apply_chat_template and tokenizers.

    python3 tests/conformance/against_templates.py [--conversations 500] [--seed 1] [--smollm2 MODEL_FOLDER]

Needs transformers (no torch); not part of `make test`. Per family: random conversations with system texts, tools, tool calls, tool
results, reasoning and odd Unicode, rendered by the family's template (tests/fixtures/text) and encoded by its tokenizer (the cut-down
ones there, or SmolLM2's own with --smollm2). Both sides must give the same ids, or both refuse the conversation. Prints a line per
family and each kind of disagreement with one example; exit status 1 if there is any.
"""
import argparse
import collections
import json
import pathlib
import random
import shutil
import sys
import urllib.error
import urllib.request

import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/text"
sys.path.insert(0, str(ROOT / "tests/integration"))
import harness  # noqa: E402

# family: template, tokenizer, begin and end of sequence
FAMILIES = {
    "chatml": ("chatml", "qwen2", None, "<|im_end|>"),
    "qwen2.5": ("qwen2.5", "qwen2", None, "<|im_end|>"),
    "qwen3": ("qwen3", "qwen2", None, "<|im_end|>"),
    "smollm2": ("smollm2", "smollm2", "<|im_start|>", "<|im_end|>"),
    "llama3.1": ("llama3.1", "llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "llama3.2": ("llama3.2", "llama3", "<|begin_of_text|>", "<|eot_id|>"),
}
PIECES = ["Hello", " the", " capital of France", "\n", "\n\n", "  ", "\t", " ", "1234567", "3.14e-5", "don't", "I'LL", "naïve", "e\u0301", "ﬁ", "Ünïcödé",
          "日本語", "中文,。", "한국어", "שלום", "مرحبا", "हिन्दी", "😀", "👩‍👩‍👧", "🇫🇷", "\u200b", "\u00a0", "\u2028", "\ufeff", "\u0000", "\x07", "�", "<|im_end|>", "<|im_start|>user\n",
          "<|eot_id|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "{{ x }}", "{% if %}", "def f(x):\n    return x\n", "</s>", "<b>&amp;</b>", "'", "\"", "\\n", "$\\alpha$",
          "a" * 40, " " * 17, "…", "—", "ſ", "İ", "ǅ", "𝔘𝔫𝔦", "e" + "\u0301" * 5]
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a place, in °C", "parameters": {
        "type": "object", "properties": {"place": {"type": "string", "description": "a <city> & 'country'"}, "days": {"type": "integer", "default": 1}}, "required": ["place"]}}},
    {"type": "function", "function": {"name": "search", "description": "Sucht \"Text\" 🔎", "parameters": {
        "type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": ["integer", "null"]}, "share": {"type": "number", "minimum": 0.5}}, "required": []}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def text(rng, most=8):
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, most)))


def value(rng, depth=2):
    kinds = [lambda: rng.randint(-10**6, 10**6), lambda: rng.choice([0.1, 1.0, 1e-7, 1e22, -2.5]), lambda: rng.random() < 0.5, lambda: None, lambda: text(rng, 3)]
    if depth:
        kinds += [lambda: [value(rng, depth - 1) for _ in range(rng.randint(0, 3))], lambda: {text(rng, 2): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}]
    return rng.choice(kinds)()


def conversation(rng, family):
    messages, options = [], {}
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    tools = rng.sample(TOOLS, rng.randint(1, 3)) if family != "chatml" and rng.random() < 0.5 else None
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text(rng)})
        if tools and rng.random() < 0.6:
            # Llama's template takes one call a message.
            count = rng.randint(1, 2) if not family.startswith("llama") or rng.random() < 0.1 else 1
            calls = [{"id": f"call{i}", "type": "function", "function": {"name": rng.choice(tools)["function"]["name"], "arguments": {text(rng, 2): value(rng) for _ in range(rng.randint(0, 3))}}}
                     for i in range(count)]
            message = {"role": "assistant", "content": text(rng, 3), "tool_calls": calls}
            if rng.random() < 0.3:
                message["reasoning_content"] = text(rng, 4)
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": text(rng, 5)} for call in calls]
        if rng.random() < 0.8:
            message = {"role": "assistant", "content": text(rng)}
            kind = rng.random()
            if kind < 0.25:
                message["reasoning_content"] = text(rng, 5)
            elif kind < 0.45:
                message["content"] = "<think>\n" + text(rng, 4) + "\n</think>\n\n" + message["content"]
            messages.append(message)
    if family == "qwen3" and rng.random() < 0.4:
        options["enable_thinking"] = rng.random() < 0.5
    if family.startswith("llama"):
        options["date_string"] = "26 Jul 2024"
        if rng.random() < 0.3:
            options["tools_in_user_message"] = False
    return messages, tools, rng.random() < 0.7, options


def make_model(folder, template, tokenizer, bos, eos):
    """A tiny model with the family's tokenizer files, which the engine never has to run."""
    size = max(token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"]) + 1
    vocab = json.loads(tokenizer.read_text())["model"]["vocab"]
    harness.prl("init-model", folder, "--family", "qwen3", "--vocab-size", max(size, max(vocab.values()) + 1), "--hidden-size", 16, "--intermediate-size", 16,
                "--num-layers", 1, "--num-heads", 1, "--num-kv-heads", 1)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template.read_text(), "eos_token": eos, "clean_up_tokenization_spaces": False}
    if bos:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def ours(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["tokens"], None
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return None, json.load(error)["error"]["message"]


def run_family(family, options, folder):
    template, tokenizer, bos, eos = FAMILIES[family]
    tokenizer_file = FIXTURES / f"{tokenizer}.tokenizer.json"
    if family == "smollm2" and options.smollm2:
        tokenizer_file = options.smollm2 / "tokenizer.json"
    make_model(folder, FIXTURES / f"{template}.jinja", tokenizer_file, bos, eos)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False)
    theirs.chat_template = (FIXTURES / f"{template}.jinja").read_text()
    rng = random.Random(f"{options.seed} {family}")
    kinds, num_tokens, num_refused = collections.Counter(), 0, 0
    port = harness.free_port()
    with harness.running("inference", "--model.name", folder, "--server.port", port, cwd=folder, log=folder / "inference.log") as process:
        harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 60, "the server to start")
        for number in range(options.conversations):
            messages, tools, add_generation_prompt, kwargs = conversation(rng, family)
            try:
                wanted = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs)
                wanted, refusal = theirs.encode(wanted, add_special_tokens=False), None
            except Exception as error:  # whatever the template raises is a refusal
                wanted, refusal = None, f"{type(error).__name__}: {error}"
            body = {"messages": messages, "add_generation_prompt": add_generation_prompt, "chat_template_kwargs": kwargs, "add_special_tokens": False}
            if tools:
                body["tools"] = tools
            found, error = ours(port, body)
            num_tokens += len(wanted or [])
            num_refused += wanted is None and found is None
            if found == wanted:
                continue
            kind = f"only we refuse: {error}" if found is None else f"only they refuse: {refusal}" if wanted is None else "other ids"
            kinds[kind] += 1
            if kinds[kind] == 1:
                print(f"  {family} #{number}: {kind}\n    {json.dumps(body)[:1500]}")
                if found and wanted:
                    print(f"    theirs {theirs.decode(wanted)!r}\n    ours   {theirs.decode(found)!r}")
    print(f"{family}: {options.conversations} conversations, {num_tokens} tokens, {num_refused} refused by both, {sum(kinds.values())} disagreements {dict(kinds)}", flush=True)
    return sum(kinds.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smollm2", type=pathlib.Path, help="a folder with the tokenizer.json of SmolLM2")
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    options = parser.parse_args()
    failures = 0
    with harness.workspace("against-templates") as folder:
        for family in options.family or FAMILIES:
            failures += run_family(family, options, folder / family)
    print(f"transformers {transformers.__version__}, seed {options.seed}: {failures} disagreements")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
