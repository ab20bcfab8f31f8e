#!/usr/bin/env python3
"""Holds our renderers (src/text/renderers) against the Python package `renderers`: renders, parsed completions, bridges.

    ninja -C build/release renderer_lines
    python3 tests/conformance/against_renderers.py [--conversations 500] [--seed 1] [--family NAME]

Needs renderers and transformers (no torch), for gpt-oss bpe-openai too (tools/harmony_reference.py); not part of `make test`, which replays committed answers of the package. Per family: random
conversations as in against_templates.py. Compared are the ids of each render and, where the package has a renderer of its own for
the family, which message each token belongs to, which would be sampled and which are content; then completions (what was rendered as the
last reply, also cut and damaged) parsed back, and the prompt of the next turn bridged from them. Families without one of their own in the package
(chatml, Qwen2.5, SmolLM2) are held against its DefaultRenderer with their template, ids only. Prints a line per family and each kind of
disagreement with an example; exit status 1 if there is a kind that KNOWN does not list.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import renderers
import transformers
from renderers import configs

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import harmony_reference  # noqa: E402
import make_text_fixtures  # noqa: E402
import against_templates as templates  # noqa: E402

FIXTURES = templates.FIXTURES
LINES = os.environ.get("PRL_RENDERER_LINES", str(templates.ROOT / "build/release/bin/renderer_lines"))
HARMONY = {"conversation_start_date": "2025-06-28"}
HARMONY_KEPT = HARMONY | {"auto_drop_analysis": False, "reasoning_effort": "high", "knowledge_cutoff": "2025-01", "model_identity": "You are Ossi."}
# family: our renderer, its template options, the package's (None: its default renderer), template, tokenizer, begin and end of sequence
FAMILIES = {
    "qwen3": ("qwen3", {}, lambda: renderers.config_from_name("qwen3"), None, "qwen2", None, "<|im_end|>"),
    "qwen3 without thinking": ("qwen3", {"enable_thinking": False}, lambda: renderers.Qwen3RendererConfig(enable_thinking=False), None, "qwen2", None, "<|im_end|>"),
    "prime-qwen3": ("prime-qwen3", {}, lambda: renderers.config_from_name("prime-qwen3"), None, "qwen2", None, "<|im_end|>"),
    "llama-3": ("llama-3", {}, lambda: renderers.config_from_name("llama-3"), None, "llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "glm-4.5": ("glm-4.5", {}, lambda: renderers.config_from_name("glm-4.5"), None, "glm", None, "<|endoftext|>"),
    "glm-4.5 without thinking": ("glm-4.5", {"enable_thinking": False}, lambda: configs.GLM45RendererConfig(enable_thinking=False), None, "glm", None, "<|endoftext|>"),
    "minimax-m2": ("minimax-m2", {}, lambda: renderers.config_from_name("minimax-m2"), None, "minimax", None, "[e~["),
    "deepseek-v3": ("deepseek-v3", {}, lambda: renderers.config_from_name("deepseek-v3"), None, "deepseek", None, "<｜end▁of▁sentence｜>"),
    "deepseek-r1": ("deepseek-r1", {}, lambda: renderers.config_from_name("deepseek-r1"), None, "deepseek", None, "<｜end▁of▁sentence｜>"),
    "qwen3.5": ("qwen3.5", {}, lambda: configs.Qwen35RendererConfig(enable_thinking=True), None, "qwen2", None, "<|im_end|>"),
    "qwen3.5 without thinking": ("qwen3.5", {"enable_thinking": False}, lambda: configs.Qwen35RendererConfig(enable_thinking=False), None, "qwen2", None, "<|im_end|>"),
    "qwen3.6": ("qwen3.6", {}, lambda: configs.Qwen36RendererConfig(enable_thinking=True), None, "qwen2", None, "<|im_end|>"),
    "qwen3.6 with all thinking": ("qwen3.6", {"preserve_thinking": True}, lambda: configs.Qwen36RendererConfig(preserve_thinking=True), None, "qwen2", None, "<|im_end|>"),
    "qwen3.8": ("qwen3.8", {}, lambda: configs.Qwen38RendererConfig(enable_thinking=True), None, "qwen2", None, "<|im_end|>"),
    "qwen3.8 with little thinking": ("qwen3.8", {"preserve_thinking": False, "reasoning_effort": "low"},
                                     lambda: configs.Qwen38RendererConfig(preserve_thinking=False, reasoning_effort="low"), None, "qwen2", None, "<|im_end|>"),
    "qwen3.8 without thinking": ("qwen3.8", {"enable_thinking": False}, lambda: configs.Qwen38RendererConfig(enable_thinking=False), None, "qwen2", None, "<|im_end|>"),
    "kimi-k2": ("kimi-k2", {}, lambda: renderers.config_from_name("kimi-k2"), None, "kimi", None, "<|im_end|>"),
    "gpt-oss": ("gpt-oss", HARMONY, lambda: configs.GptOssRendererConfig(**HARMONY), None, "harmony", None, "<|return|>"),
    "gpt-oss, whole vocabulary": ("gpt-oss", HARMONY, lambda: configs.GptOssRendererConfig(**HARMONY), None, "harmony whole", None, "<|return|>"),
    "gpt-oss with analysis": ("gpt-oss", HARMONY_KEPT, lambda: configs.GptOssRendererConfig(**HARMONY_KEPT), None, "harmony", None, "<|return|>"),
    "chatml": ("chatml", {}, None, "chatml", "qwen2", None, "<|im_end|>"),
    "qwen2.5": ("qwen2.5", {}, None, "qwen2.5", "qwen2", None, "<|im_end|>"),
    "smollm2": ("smollm2", {}, None, "smollm2", "smollm2", "<|im_start|>", "<|im_end|>"),
}
# Disagreements that are meant: (pattern of the family, pattern of the kind, why). docs/conformance.md tells the same.
KNOWN = [
    ("", "a message spells the name of a token$", "text of messages never becomes a special token here"),
    ("", "a reply begins with white space$", "a reply is encoded apart from its header, so that the prompt stays its prefix"),
    ("", "a think block is opened twice$", "the package leaves the second tag out of what was damaged"),
    ("", "only they bridge: there is text behind the end of the turn$", "the package drops that text, and with it its promise that the ids go on"),
]


MARKS = re.compile(r"<\|[a-z_]+\|>|</?(minimax:)?tool_call>|</?think>|</?arg_(key|value)>|<｜[^｜]*｜>|\]~!?b[\[\]]|\[e~\[|/nothink")


class Ours:
    def __init__(self, renderer, tokenizer, kwargs):
        self.process = subprocess.Popen([LINES, renderer, tokenizer, json.dumps(kwargs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"renderer_lines ended with {self.process.wait()}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Comparison:
    def __init__(self, family, options):
        name, kwargs, config, template, tokenizer, bos, eos = FAMILIES[family]
        file = FIXTURES / f"{tokenizer}.tokenizer.json"
        if tokenizer == "harmony whole":
            file = pathlib.Path(tempfile.mkdtemp(prefix="prl_harmony_")) / "tokenizer.json"
            harmony_reference.whole_tokenizer(make_text_fixtures.O200K_REGEX).save(str(file))
        self.family, self.options, self.is_own = family, options, config is not None
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False)
        if name in ("qwen3.5", "qwen3.6", "qwen3.8"):  # the package asks for them at once, though texts have none
            self.tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]})
        if name == "gpt-oss" and tokenizer != "harmony whole":
            harmony_reference.use_vocabulary_of(self.tokenizer)
        elif name == "gpt-oss":
            harmony_reference.use_own_vocabulary()
        if template:
            self.tokenizer.chat_template = (FIXTURES / f"{template}.jinja").read_text()
        self.theirs = renderers.create_renderer(self.tokenizer, config() if config else renderers.DefaultRendererConfig())
        self.ours = Ours(name, file, kwargs)
        self.rng = random.Random(f"{options.seed} {family}")
        self.spells = False
        self.kinds, self.counts = collections.Counter(), collections.Counter()

    def differ(self, kind, what, theirs, ours):
        self.kinds[kind] += 1
        if self.kinds[kind] <= self.options.examples:
            print(f"  {self.family}: {kind}\n    {json.dumps(what)[:1500]}\n    theirs {str(theirs)[:1500]}\n    ours   {str(ours)[:1500]}")

    def kind_of_ids(self, theirs, ours, name="ids"):
        """Whether the two are the same text, and differ only where a message spells a token that the vocabulary has by name."""
        if self.tokenizer.decode(theirs) != self.tokenizer.decode(ours):
            return f"other {name}"
        added = set(self.tokenizer.added_tokens_decoder)
        if [id for id in theirs if id in added] != [id for id in ours if id in added]:
            return f"other {name} of the same text: a message spells the name of a token"
        first = next(i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b)
        if re.search(r"assistant$", self.tokenizer.decode(ours[:first])) and re.match(r"\n\s", self.tokenizer.decode(ours[first:])):
            return f"other {name} of the same text: a reply begins with white space"
        return f"other {name} of the same text"

    def where(self, theirs, ours):
        """The tokens around the first difference."""
        first = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
        return [self.tokenizer.convert_ids_to_tokens(ids[max(0, first - 3):first + 6]) for ids in (theirs, ours)]

    def text(self, ids):
        return repr(self.tokenizer.decode(ids)) if ids is not None else None

    def conversation(self):
        messages, tools, add_generation_prompt, _ = templates.conversation(self.rng, "chatml" if self.family == "smollm2" else self.family)
        # Names of tokens are spelt in every second conversation only, so that half of them must agree in everything else.
        self.spells = not self.spells
        if self.family.startswith("gpt-oss"):
            messages, tools = self.harmony_conversation(messages, tools)
        messages = messages if self.spells else json.loads(MARKS.sub("<-mark->", json.dumps(messages)))
        return messages, tools, add_generation_prompt

    def harmony_conversation(self, messages, tools):
        """Schemas of many kinds, names beside results, developers' messages and system messages in the middle."""
        rng = self.rng
        tools = [tool if rng.random() < 0.3 else {"type": "function", "function": {"name": tool["function"]["name"], "description": templates.text(rng, 4),
                                                                                   "parameters": harmony_reference.schema(rng, templates.text, 3)}} for tool in tools or []] or None
        for message in messages:
            if message["role"] == "tool" and tools and rng.random() < 0.8:
                message["name"] = rng.choice(["", "functions."]) + tools[0]["function"]["name"]
        if rng.random() < 0.2:
            messages.insert(rng.randrange(len(messages) + 1), {"role": rng.choice(["system", "developer"]), "content": templates.text(rng, 4)})
        calls = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if calls and rng.random() < 0.5:
            messages = messages[:rng.choice(calls) + 1]
        return json.loads(re.sub(r"<\|im_(start|end)\|>", lambda mark: rng.choice(["<|start|>", "<|end|>", "<|call|>", mark[0]]), json.dumps(messages))), tools

    def render(self, messages, tools, add_generation_prompt):
        self.counts["conversations"] += 1
        try:
            theirs, refusal = self.theirs.render(messages, tools=tools, add_generation_prompt=add_generation_prompt), None
        except Exception as error:  # whatever the package raises is a refusal
            theirs, refusal = None, f"{type(error).__name__}: {error}"
        ours = self.ours.ask(op="render", messages=messages, tools=tools or [], add_generation_prompt=add_generation_prompt)
        what = {"messages": messages, "tools": [tool["function"]["name"] for tool in tools or []], "add_generation_prompt": add_generation_prompt}
        if theirs is None or "error" in ours:
            self.counts["refused by both"] += theirs is None and "error" in ours
            if theirs is None and "error" not in ours:
                self.differ(f"only they refuse: {refusal.splitlines()[0][:80]}", what, refusal, self.text(ours["ids"]))
            elif theirs is not None:
                self.differ(f"only we refuse: {re.sub(r'[0-9]+', 'N', ours['error'])[:80]}", what, self.text(theirs.token_ids), ours["error"])
            return None
        self.counts["tokens"] += len(theirs.token_ids)
        if theirs.token_ids != ours["ids"]:
            self.differ(self.kind_of_ids(theirs.token_ids, ours["ids"]), what, *self.where(theirs.token_ids, ours["ids"]))
            return None
        if self.is_own:
            for field in ("message_indices", "sampled_mask", "is_content"):
                if [int(value) for value in getattr(theirs, field)] != ours[field]:
                    wrong = [(i, self.text([ours["ids"][i]]), int(a), b) for i, (a, b) in enumerate(zip(getattr(theirs, field), ours[field])) if int(a) != b]
                    self.differ(f"other {field}", what, wrong[:12], self.text(ours["ids"]))
        return ours

    def completion_of(self, rendered, messages):
        """(prompt, ids that the model would have written) of the last message, if that is a reply."""
        if not messages or messages[-1]["role"] != "assistant":
            return None
        last = len(messages) - 1
        places = [i for i, (index, sampled) in enumerate(zip(rendered["message_indices"], rendered["sampled_mask"])) if index == last and sampled]
        return (rendered["ids"][:places[0]], rendered["ids"][places[0]:places[-1] + 1]) if places else None

    def damaged(self, ids):
        ids = list(ids)
        for _ in range(self.rng.randint(0, 2)):
            place = self.rng.randrange(len(ids) + 1)
            if self.rng.random() < 0.5:
                del ids[place:place + self.rng.randint(1, 4)]
            else:
                # The markers of harmony are single tokens that begin and end everything.
                own = [id for id in self.tokenizer.added_tokens_decoder] if self.family.startswith("gpt-oss") and self.rng.random() < 0.5 else ids
                ids[place:place] = self.rng.choices(own or [5], k=self.rng.randint(1, 3))
        return ids[:self.rng.randrange(len(ids) + 1)] if self.rng.random() < 0.3 else ids

    def parse(self, prompt, ids, tools):
        self.counts["completions"] += 1
        theirs = self.theirs.parse_response(ids, tools=tools, prompt_ids=prompt)
        ours = self.ours.ask(op="parse", ids=ids, prompt=prompt, tools=tools or [])
        what = {"completion": self.tokenizer.decode(ids), "tokens": self.tokenizer.convert_ids_to_tokens(ids[:40]), "prompt": self.tokenizer.decode(prompt)[-60:]}
        if "error" in ours:
            return self.differ("only we refuse to parse", what, theirs, ours)
        calls = [[call.name, call.arguments, str(call.status.value)] for call in theirs.tool_calls]
        if [call[2] for call in calls] != [call[2] for call in ours["calls"]]:
            return self.differ("other tool call states", what, calls, ours["calls"])
        good = [call for call in ours["calls"] if call[2] == "ok"]
        if [call[:2] for call in calls if call[2] == "ok"] != [call[:2] for call in good]:
            self.differ("other tool calls", what, calls, ours["calls"])
        # Markup that is no usable call stays in the content here.
        is_content_equal = ours["content"] == theirs.content if len(good) == len(calls) else ours["content"].startswith(theirs.content)
        if not is_content_equal:
            self.differ("other content", what, repr(theirs.content), repr(ours["content"]))
        if theirs.reasoning_content != ours["reasoning"]:
            twice = ": a think block is opened twice" if what["completion"].count("<think>") > 1 else ""
            self.differ("other reasoning" + twice, what, repr(theirs.reasoning_content), repr(ours["reasoning"]))

    def bridge(self, prompt, ids, tools):
        self.counts["bridges"] += 1
        tail = []
        for _ in range(self.rng.choice([0, 0, 1, 2]) if tools else 0):
            tail.append({"role": "tool", "tool_call_id": "call0", "content": templates.text(self.rng, 4)})
        if not tail or self.rng.random() < 0.4:
            tail.append({"role": "user", "content": templates.text(self.rng)})
        if self.rng.random() < 0.05:
            tail.append({"role": "assistant", "content": "no"})
        theirs = self.theirs.bridge_to_next_turn(prompt, ids, tail, tools=tools)
        ours = self.ours.ask(op="bridge", prompt=prompt, completion=ids, messages=tail, tools=tools or [])
        what = {"prompt": self.tokenizer.decode(prompt)[-200:], "completion": self.tokenizer.decode(ids), "messages": tail}
        found = ours.get("ids", ours.get("error"))
        wanted = None if theirs is None else list(theirs.token_ids)
        self.counts["bridges refused by both"] += wanted is None and found is None
        if wanted != found:
            if isinstance(found, list) and wanted is not None:
                return self.differ(self.kind_of_ids(wanted, found, "bridges"), what, *self.where(wanted, found))
            ends = {self.tokenizer.eos_token_id, *self.theirs.get_stop_token_ids()}
            beyond = ": there is text behind the end of the turn" if ends & set(ids) and ids[-1] not in ends else ""
            kind = "only they bridge" + beyond if found is None else "only we bridge" if wanted is None else f"we fail to bridge: {found}"
            self.differ(kind, what, self.text(wanted), self.text(found) if isinstance(found, list) else found)

    def run(self):
        for _ in range(self.options.conversations):
            messages, tools, add_generation_prompt = self.conversation()
            rendered = self.render(messages, tools, add_generation_prompt)
            if not self.is_own or rendered is None:
                continue
            if add_generation_prompt:
                rendered = self.render(messages, tools, False)
            reply = self.completion_of(rendered, messages) if rendered else None
            if not reply:
                continue
            for ids in (reply[1], self.damaged(reply[1])):
                self.parse(reply[0], ids, tools)
                self.bridge(reply[0], ids, tools)
        self.ours.close()
        unknown = {kind: count for kind, count in self.kinds.items() if not any(re.search(f, self.family) and re.search(k, kind) for f, k, _ in KNOWN)}
        print(f"{self.family}: {json.dumps(self.counts)}; disagreements {dict(self.kinds)}", flush=True)
        return sum(unknown.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, default=1, help="shown for each kind of disagreement")
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    options = parser.parse_args()
    failures = sum(Comparison(family, options).run() for family in options.family or FAMILIES)
    print(f"renderers {renderers.__version__}, seed {options.seed}: {failures} disagreements that are not listed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
