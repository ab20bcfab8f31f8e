#!/usr/bin/env python3
"""Makes tests/fixtures/text/characters: tokenizers made from SentencePiece, and what the Python package `tokenizers` gives for them.
Run in a virtual environment with `tokenizers`, 0.22 at most:

    make_sentencepiece_fixtures.py           # *.tokenizer.json and cases.json
    make_sentencepiece_fixtures.py cases     # only cases.json, for the vocabularies that are there

Version 0.23 decodes added tokens that are "normalized" in another spelling than the file's, and does not skip special ones among them.
The vocabularies are trained here; normalizers, pre-tokenizers, decoders, post-processors and added tokens are those of the
published files of each family. `cases.json` has, for each family, ids and decoded texts of the texts of make_text_fixtures.py.
"""
import glob
import json
import os
import random
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from make_text_fixtures import HARD, HERE, INVALID, SAMPLES, random_strings
from make_text_fixtures import fnv as fnv64

OUT = os.path.join(HERE, "..", "tests", "fixtures", "text", "characters")
MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Letters beyond ASCII that the vocabularies know; all other characters fall back.
LETTERS = "éüñçßøåÉабвгдежиклмнопрстуАБΣαβγδ你好世界的一是、。“”’—…€"
MORE = ["<s>", "</s>", "a<s>b", "<s>a", " <s> a", "<s><s>", "<s> Hello</s> world ", "<unk>", "x <unk> y", "<unk>y", f"{MARK}", f"{MARK}{MARK}a", f"a{MARK}b {MARK} c",
        f"{MARK}Hello", "[INST] Hi [/INST]", "<|user|>\n Hi<|end|>\n<|assistant|> \n ok", "<bos><start_of_turn>user\nHi<end_of_turn>\n", "<0x41>", "<0xE4>", "a<0x0A>b <0xE4><0xBD><0xA0>",
        "\u20ac\u4f60\u597d\u9f98", "\u9f98\u9f98\u9f98 a \u9f98", "na\u00efve co\u00f6perate", "  two  spaces   three", "tab\tand\nnewline \n x", "''quoted'' ``so'' a--b", "nl\n\n\n\nnl\t\t", "ends with space ", "\n", " \n", "\n ", "\t ",
        "q\u0301", "a\U00011c44\x03b\u166d\x03c", "\U0001f600\U0001f600", "a\U0001f600 b", "x" * 300, "\u9f98" * 40, "\u4f60" * 40, ("ab " * 50), "\u00e9 e\u0301"]


def fnv(data):
    """Half of the hash: enough to tell answers apart."""
    return fnv64(data)[:8]


def corpus():
    texts = [SAMPLES] * 5
    for pattern in ("docs/*.md", "README.md", "src/text/*.cpp"):
        for path in sorted(glob.glob(os.path.join(HERE, "..", pattern))):
            texts.append(open(path, encoding="utf-8").read())
    return texts


def spm_decoder(strips=True):
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if strips else steps)


def with_bos(name):
    return lambda tok: processors.TemplateProcessing(single=name + " $A", pair=name + " $A " + name + ":1 $B:1",
                                                     special_tokens=[(name, tok.token_to_id(name))])


def families():
    special = lambda *names, **flags: [AddedToken(n, special=True, normalized=False, **flags) for n in names]
    prepend = lambda: normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    trio = ["<unk>", "<s>", "</s>"]
    return {
        "llama2": dict(vocab=700, first=trio, norm=prepend(), decoder=spm_decoder(), post=with_bos("<s>"), added=special(*trio)),
        # Older files: merges as strings, and the special tokens are looked for in normalized text.
        "llama2_old": dict(vocab=420, first=trio, norm=prepend(), decoder=spm_decoder(), post=with_bos("<s>"), old_merges=True,
                           added=[AddedToken(n, special=True, normalized=True) for n in trio]),
        "mistral3": dict(vocab=700, first=trio + ["[INST]", "[/INST]"], pre=pre_tokenizers.Metaspace(MARK, "first", False),
                         decoder=spm_decoder(), post=with_bos("<s>"), added=special(*trio, "[INST]", "[/INST]")),
        "phi3": dict(vocab=420, first=trio, norm=prepend(), decoder=spm_decoder(), added=special("<unk>", "<s>")
                     + [AddedToken("</s>", special=False, normalized=False, rstrip=True)]
                     + special("<|endoftext|>") + special("<|assistant|>", "<|user|>", "<|end|>", rstrip=True)),
        "gemma": dict(vocab=700, first=["<pad>", "<eos>", "<bos>", "<unk>"], norm=normalizers.Replace(" ", MARK),
                      pre=pre_tokenizers.Split(" ", "merged_with_previous"), decoder=spm_decoder(False), post=with_bos("<bos>"),
                      added=special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
                      + [AddedToken(t, special=False, normalized=False) for t in ["\n\n", "\n\n\n", MARK * 2, MARK * 3, "\t\t"]]),
        # No fallback: what the vocabulary lacks is unknown, and Metaspace both splits and decodes.
        "metaspace": dict(vocab=500, first=["<unk>"], pre=pre_tokenizers.Metaspace(MARK, "always", True), decoder=decoders.Metaspace(MARK, "always"),
                          fallback=False, added=special("<unk>")),
        # No real model: every other option at once. Some bytes are missing, words known whole are not merged.
        "odd": dict(vocab=500, first=["<unk>"], fuse=False, drop_bytes=range(0x80, 0xB0), ignore_merges=True,
                    norm=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("``|''"), '"'), normalizers.Replace("--", "\u2014")]),
                    pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Metaspace(MARK, "first", True), pre_tokenizers.Punctuation()]),
                    decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(MARK, "first"), decoders.Replace(Regex("[.]"), "!"),
                                               decoders.Strip("e", 1, 0), decoders.Fuse(), decoders.Strip("a", 2, 0), decoders.Strip("\n", 0, 2)]),
                    added=special("<unk>", "<s>") + [AddedToken("<mask>", lstrip=True, normalized=True), AddedToken("word", single_word=True, normalized=True),
                                                     AddedToken("e\u0301", normalized=True)]),
    }


def build(spec, texts):
    fallback = spec.get("fallback", True)
    first = spec["first"] + (BYTES if fallback else [])
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=spec.get("fuse", True), byte_fallback=fallback, ignore_merges=spec.get("ignore_merges", False)))
    # As SentencePiece trains: words begin with the mark and merges stay inside words.
    tok.normalizer = normalizers.Replace(" ", MARK)
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(MARK, "merged_with_next"), pre_tokenizers.Split(Regex(r"\n|\t"), "removed")])
    alphabet = sorted({c for c in LETTERS} | {chr(c) for c in range(0x21, 0x7F)} | {MARK})
    trainer = trainers.BpeTrainer(vocab_size=spec["vocab"], special_tokens=first, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False)
    tok.train_from_iterator(texts, trainer)
    data = json.loads(tok.to_str())
    model = data["model"]
    # Runs of spaces, which cross the borders of words.
    for size in (2, 4):
        model["vocab"][MARK * size] = max(model["vocab"].values()) + 1
        model["merges"].append([MARK * (size // 2), MARK * (size // 2)])
    for byte in spec.get("drop_bytes", ()):
        del model["vocab"][f"<0x{byte:02X}>"]
    data["added_tokens"] = []
    tok = Tokenizer.from_str(json.dumps(data))
    tok.normalizer, tok.pre_tokenizer, tok.decoder = spec.get("norm"), spec.get("pre"), spec["decoder"]
    for token in spec["added"]:
        (tok.add_special_tokens if token.special else tok.add_tokens)([token])
    if "post" in spec:
        tok.post_processor = spec["post"](tok)
    data = json.loads(tok.to_str())
    if spec.get("old_merges"):
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    if data["pre_tokenizer"] and data["pre_tokenizer"]["type"] == "Metaspace" and data["pre_tokenizer"]["prepend_scheme"] == "always":
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "add_prefix_space": True, "str_rep": MARK}  # the older spelling
    return data


def sequences(tok, rng, count):
    """Ids at random, with many bytes among them: whole characters, characters cut short, and bytes that begin none."""
    size = tok.get_vocab_size(with_added_tokens=True)
    byte_ids = [i for i in map(tok.token_to_id, BYTES) if i is not None]
    out = []
    for _ in range(count):
        ids = []
        while len(ids) < rng.randint(1, 14):
            kind = rng.random()
            if kind < 0.4 or not byte_ids:
                ids.append(rng.randrange(size))
            elif kind < 0.6:
                ids.append(rng.choice(byte_ids))
            elif kind < 0.8:
                spelled = [tok.token_to_id(f"<0x{b:02X}>") for b in rng.choice("é你😀\n\u9f98 ").encode()]
                ids += [i for i in spelled if i is not None][:rng.choice([1, 2, 3, 4])]
            else:
                ids += [i for i in [tok.token_to_id(rng.choice([MARK, MARK * 2, MARK + "the", "<s>", "<unk>", "a", "e"]))] if i is not None]
        out.append(ids)
    return out


def decode(tok, ids, skip):
    """None where `tokenizers` stops with an index error: Strip of an empty token's end."""
    try:
        return tok.decode(ids, skip_special_tokens=skip)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def main():
    os.makedirs(OUT, exist_ok=True)
    texts, rng = corpus(), random.Random(20250607)
    hard, randoms = HARD + MORE, random_strings(rng, 200)
    cases = {"made_with": "tokenizers " + tokenizers.__version__, "hard": MORE, "random": randoms, "invalid": INVALID, "families": {}}
    for name, spec in families().items():
        path = os.path.join(OUT, name + ".tokenizer.json")
        if "cases" not in sys.argv[1:]:
            with open(path, "w", encoding="utf-8") as f:
                json.dump(build(spec, texts), f, ensure_ascii=False, separators=(",", ":"))
        tok = Tokenizer.from_file(path)
        enc = lambda s, special=False: tok.encode(s, add_special_tokens=special).ids
        out = {"ids": [enc(s) for s in MORE], "hard": [fnv(enc(s)) for s in HARD]}
        with_special = [enc(s, True) for s in hard]
        out["random"] = [fnv(enc(s)) for s in randoms]
        out["invalid"] = [fnv(enc(bytes.fromhex(s).decode(errors="replace"))) for s in INVALID]
        both = lambda ids: (decode(tok, ids, True), decode(tok, ids, False))
        hash_of = lambda texts: None if None in texts else fnv("\0".join(texts).encode())
        every = [enc(s) for s in hard]
        out["decoded"] = [hash_of(both(ids)) for ids in every]
        out["random_ids"] = sequences(tok, rng, 120)
        out["random_decoded"] = [decode(tok, ids, True) for ids in out["random_ids"]]
        out["random_decoded_all"] = [hash_of(both(ids)) for ids in out["random_ids"]]
        tok.encode_special_tokens = True
        out["special_and_plain"] = [fnv(special + enc(s)) for special, s in zip(with_special, hard)]
        cases["families"][name] = out
    with open(os.path.join(OUT, "cases.json"), "w", encoding="utf-8") as f:
        json.dump(cases, f, ensure_ascii=True, separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main())
