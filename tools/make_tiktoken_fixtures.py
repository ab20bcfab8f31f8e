#!/usr/bin/env python3
"""Makes tests/fixtures/text/tiktoken: a small vocabulary of ranks as Moonlight and Kimi K2 publish theirs, and the ids that the package
`tiktoken` gives for texts with it.

    python3 tools/make_tiktoken_fixtures.py [OUT]       (default: tests/fixtures/text/tiktoken beside this file)

Needs tiktoken and regex, which it brings; no network. The ranks are learned here by merging the commonest pair within words; the splitting pattern is that of the
models' tokenization_kimi.py.
"""
import base64
import collections
import json
import pathlib
import sys

import regex
import tiktoken

LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([r"[\p{Han}]+", r"[^\r\n\p{L}\p{N}]?" + LETTERS[0] + "*" + LETTERS[1] + "+" + SUFFIX,
                    r"[^\r\n\p{L}\p{N}]?" + LETTERS[0] + "+" + LETTERS[1] + "*" + SUFFIX, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+",
                    r"\s+(?!\S)", r"\s+"])
NUM_RANKS = 600
CORPUS = """The quick brown fox jumps over the lazy dog. They're sure it's what we've seen; I'LL SAY SO, he said. HTTPServer parseJSON camelCaseWords
def function(argument):\n    return argument * 2  # comment\n\nfor (int i = 0; i < 100; ++i) { sum += values[i]; }\n
中文和English混合的文本，数字12345。机器学习模型在这里训练。日本語のテキストもあります。한국어 문장도 있습니다. Русский текст тоже здесь. العربية
naïve café Ünïcödé ǅungla ʰello e\u0301tude 👩‍👩‍👧 🚀 1,234,567.89 3.14159 x²+y²=z² \t\ttabs   spaces    end
""" * 3
SPECIALS = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 10: "[PAD]"}


def learn():
    # `regex` writes a difference of classes where tiktoken writes an intersection.
    pattern = PATTERN.replace("&&[^\\p{Han}]]", "--\\p{Han}]")
    words = collections.Counter(tuple(bytes([b]) for b in word.encode()) for word in regex.findall(pattern, CORPUS, regex.V1))
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < NUM_RANKS:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(left + right)
        merged = collections.Counter()
        for word, count in words.items():
            out, i = [], 0
            while i < len(word):
                if word[i:i + 2] == (left, right):
                    out.append(left + right)
                    i += 2
                else:
                    out.append(word[i])
                    i += 1
            merged[tuple(out)] += count
        words = merged
    return tokens


def texts():
    lines = [line for line in CORPUS.split("\n") if line][:9]
    out = ["", " ", "\n", "  \n\n  ", "a", "A", "中", "中a文", "Aa中Bb", "it'S", "I'Ll 'tis", "12345678", "x1y22z333", "\r\n\r\nhi\r\n", "…—“quoted”", "  lead", "trail  ",
           "tab\tend", "ABCdefGHI", "ǅǅa", "ʰʰ", "e\u0301\u0301E\u0301", "한국어와漢字", "ひらがなカタカナ漢字", "🚀🚀 go", "👩‍👩‍👧", "\u00a0nbsp", "(中文)", "'中'", "don't中", "𠀀𠀁a",
           "々〆", "\u200bzero", "a" * 50, "A" * 50, "Ω≈ç√", "<|im_end|> plain"]
    for line in lines:
        out.append(line)
        out += [line[i:i + 23] for i in range(0, len(line), 17)]
    return out


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/text/tiktoken"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = learn()
    assert len(set(tokens)) == NUM_RANKS
    (folder / "tiktoken.model").write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    config = {"added_tokens_decoder": {str(NUM_RANKS + i): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                                                             "single_word": False} for i, text in SPECIALS.items()},
              "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "tokenizer_class": "TikTokenTokenizer", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks={token: rank for rank, token in enumerate(tokens)}, special_tokens={})
    cases = [[text, encoding.encode(text, disallowed_special=())] for text in texts()]
    (folder / "cases.json").write_text(json.dumps(cases, ensure_ascii=False) + "\n")
    print(len(cases), "texts", sum(len(ids) for _, ids in cases), "ids")


main()
