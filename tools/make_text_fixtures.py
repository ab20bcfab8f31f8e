#!/usr/bin/env python3
"""Makes tests/fixtures/text: tokenizers of each family, and what Python gives for them. Run in a virtual environment with
`tokenizers`, `jinja2` and `transformers` (no torch needed):

    make_text_fixtures.py tokenizers     # *.tokenizer.json and tokenizer_cases.json
    make_text_fixtures.py templates      # template_cases.json from the *.jinja files and text_fixture_cases.py
    make_text_fixtures.py language       # jinja_cases.json from jinja_language_cases.py
    make_text_fixtures.py renderers      # renderer_cases.json; needs `renderers` 0.1.12, `httpx` and `openai` too
    make_text_fixtures.py family_tokenizers  # tokenizers of the families in renderer_family_cases.json
    make_text_fixtures.py families       # renderer_family_cases.json; needs what `renderers` needs, and `bpe-openai` (harmony_reference.py)

The vocabularies are trained here on text of this repository and of the Python library, with each family's normalizer,
pre-tokenizer, post-processor and added tokens as published; the real vocabularies are large and not needed to prove the code.
"""
import glob
import json
import os
import random
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "..", "tests", "fixtures", "text")

GPT_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2_REGEX = GPT_WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_REGEX = GPT_WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_REGEX = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])

SAMPLES = """
The quick brown fox jumps over the lazy dog. It's what we've been told, isn't it? I'M SURE THEY'LL AGREE, HE'D SAID.
Reverse the text character by character: the answer goes between the tags.
Sort these names alphabetically, please: Zoë, Ångström, José, Łukasz, Ñandú, Éloïse, François, Straße, naïve café.
Привет, мир! Как дела? Быстрая коричневая лиса. Η γρήγορη καφέ αλεπού. שלום עולם, מה שלומך היום? مرحبا بالعالم، كيف حالك؟
你好，世界。今天天气怎么样？快速的棕色狐狸跳过了懒狗。こんにちは、世界！素早い茶色の狐。안녕하세요 세계, 오늘 날씨가 어때요?
नमस्ते दुनिया, आप कैसे हैं? สวัสดีชาวโลก Xin chào thế giới 😀 😃 🎉 👍🏽 👩‍💻 🇫🇷 ❤️ 1234567890 3.14159 2,048 0x1F
def main(argc: int, argv: list[str]) -> int:\n    for i in range(10):\n        print(f"{i}: {i ** 2}")\n    return 0
#include <vector>\ntemplate <typename T> void swap(T& a, T& b) { T c = a; a = b; b = c; }\n\tif (x != y) { ++count; }
{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
"""

HARD = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", "Hello", "Hello, world!", " Hello  world ", "hello\nworld\r\nagain\rend",
    "It's what we've got, isn't it? They'll say I'm fine; he'd go. You're 're 'RE 'Ll 'D'S'T",
    "IT'S WHAT WE'VE GOT, ISN'T IT? THEY'LL SAY I'M FINE; HE'D GO. YOU'RE", "'ſ 'ſt it'ſ ’s don’t",
    "1", "12", "123", "1234", "12345", "1234567890" * 5, "3.14159e-10", "1,234,567.89", "٣٤٥ १२३ 一二三 Ⅻ ½ ²³ ①②", "0x1F 0b101",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n", "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; } // done\n",
    "a  b   c    d     e", "    indented\n        more\n\n\n\n    end   ", " \n \n \n", "\n\n\n\n", "\t\t\tx\t\ty", "x \n y", "x\n y", "x  \n",
    "trailing   ", "   leading", " nbsp and\u3000ideographic\u2003em\u2028line\u2029para\u0085nel\u180emvs\u200bzwsp\ufeffbom",
    "\x00\x01\x02\x7f\x80\x9f", "\x0b\x0c\x1c\x1d\x1e\x1f",
    "😀", "👩‍💻", "👨‍👩‍👧‍👦 family", "👍🏽👍🏿", "🏳️‍🌈🏴‍☠️", "🇫🇷🇩🇪🇯🇵", "❤️ vs ❤", "1️⃣#️⃣", "🧑🏻‍❤️‍💋‍🧑🏿", "a😀b😃c",
    "é", "e\u0301", "Å", "A\u030a", "\u212b", "ñ n\u0303", "ḍ̇ d\u0323\u0307 d\u0307\u0323", "q\u0307\u0323", "\u1e9b\u0323",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA",
    "\u0958\u0959", "\u0f43\u0f4d", "\u2126 \u212a \u1fef", "ﬁ ﬂ ﬀ ﬃ", "각 \u1100\u1161\u11a8 \u1100\u1161 \uac00\u11a8", "\u0344 \u0374 \u037e \u0387",
    "\u0301 leading mark", "한국어 텍스트", "你好世界", "今日は良い天気ですね。", "繁體中文與简体中文混排abc123", "𠀀𠀁𪚥", "カタカナ ﾊﾝｶｸ ＦＵＬＬ",
    "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم", "العَرَبِيَّة", "\u202eRTL override\u202c", "abc \u200f rtl mark \u200e", "नमस्ते दुनिया क्षत्रिय", "ประเทศไทย", "ไทยกำ", "မြန်မာ", "தமிழ்", "ქართული",
    "Здравствуй, МИР! Ёлка ёж", "Γειά σου Κόσμε ΟΔΟΣ", "İstanbul ıI", "ǅ Ǆ ǆ", "Straße STRASSE", "ŉ ǰ",
    "http://example.com/a/b?c=d&e=f#g", "user.name+tag@example.co.uk", "C:\\Users\\x\\y", "/usr/local/bin", "$PATH ${HOME} `ls`", "a_b_c __init__ CamelCaseWord snake_case",
    "<html><body>&nbsp;</body></html>", "{\"a\": [1, 2.5, null, true], \"b\": \"\\u00e9\\n\"}", "x = {**a, 'b': [*c]}", "!!!???...---***///", "!\n!\r\n!\n\n", "!/\n", "((((((", "=====>>>><<<<", "—–‐‑ “quotes” ‘single’ «guillemets» …",
    "∑∏∫√∞≈≠≤≥ αβγδ ℝℂℕ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒳²", "€£¥₹₿¢", "©®™°µ¶§", "→←↑↓⇒⇔", "┌─┐│█▓░", "\U000e0041tag\U000e007f", "\uE000\uF8FF private", "\U0010fffd \ufffe \uffff \ufffd",
    "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b", "<|im_end|", "|im_end|>", "<|im_end|><|im_end|>", "< |im_end|>", "<|IM_END|>", " <|im_end|> ", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "<|eot_id|> <|eom_id|>",
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", "<think>\nhm\n</think>\n\nyes", "<think", "x<think>y", "<|endoftext|>e\u0301<|endoftext|>\u0301",
    "aaaa" * 64, " " * 257, "\n" * 65, "ab" * 100, "😀" * 20, "e\u0301" * 33, "\t \t " * 30, "-" * 100, "0" * 100, "a" * 1000 + " " + "b" * 999, "word " * 60, " \n" * 40, "\r" * 9 + "\n" * 9,
    "supercalifragilisticexpialidocious antidisestablishmentarianism", "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor.",
    "The answer is 42.The next is 43.  And\tthen 44…", "mixed العربية and English 混合 текст", "a\u0300\u0301\u0302b", "\u0e33\u0e4d\u0e32", "ᄀᄀᄀ각ᆨᆨ", "'s", " 's", "''s", "x's's", "'", "' s",
]
INVALID = ["ff", "c3", "c328", "e282", "e28228", "f09f98", "f09f9841", "f0288cbc", "f4908080", "eda080", "edbfbf", "c080", "c1bf", "e08080", "f8888080", "80", "808080", "61ff62", "e4bda0e5a5", "c3a9c3", "f09f9880f09f98", "fe", "41e2e2e28241", "f0f0f09f9880", "ed9fbfeea080"]


def corpus():
    texts = [SAMPLES] * 20
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:60]:
        texts.append(open(path, encoding="utf-8", errors="replace").read())
    return texts


def fnv(ids):
    h = 0xCBF29CE484222325
    data = ids if isinstance(ids, bytes) else b"".join(int(i).to_bytes(4, "little") for i in ids)
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def families():
    from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
    special = lambda *names: [AddedToken(n, special=True, normalized=False) for n in names]
    plain = lambda *names: [AddedToken(n, special=False, normalized=False) for n in names]
    pt = pre_tokenizers
    byte_level = lambda: pt.ByteLevel(add_prefix_space=False, use_regex=False)
    split = lambda regex: pt.Sequence([pt.Split(Regex(regex), "isolated"), byte_level()])
    return {
        "gpt2": dict(vocab=700, pre=pt.ByteLevel(add_prefix_space=False), post=processors.ByteLevel(trim_offsets=False),
                     added=special("<|endoftext|>")),
        "qwen2": dict(vocab=900, norm=normalizers.NFC(), pre=split(QWEN2_REGEX), post=processors.ByteLevel(trim_offsets=False),
                      added=special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
                      + plain("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")),
        "llama3": dict(vocab=900, pre=split(LLAMA3_REGEX), ignore_merges=True, bos="<|begin_of_text|>",
                       added=special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                                     "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")),
        "smollm2": dict(vocab=700, pre=pt.Sequence([pt.Digits(individual_digits=True), pt.ByteLevel(add_prefix_space=False)]),
                        first=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>"],
                        added=special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>")),
        "o200k": dict(vocab=600, pre=split(O200K_REGEX), added=special("<|endoftext|>", "<|im_end|>")),
        # What write_byte_level_tokenizer makes: no merges at all.
        "bytes": dict(vocab=0, pre=split(QWEN2_REGEX), post=processors.ByteLevel(trim_offsets=False),
                      added=special("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
        # No real model: every flag and behaviour at once.
        "odd": dict(vocab=500, norm=normalizers.Sequence([normalizers.NFC()]),
                    pre=pt.Sequence([pt.Split("--", "removed"), pt.Split(Regex(r"[.!?]+"), "merged_with_previous"),
                                     pt.Split(Regex(r"[(\[]"), "merged_with_next"), pt.Split(Regex(r"\p{Lu}"), "contiguous"),
                                     pt.Split(Regex(r"\w+"), "isolated", invert=True), pt.Digits(individual_digits=False),
                                     pt.ByteLevel(add_prefix_space=True, use_regex=True)]),
                    post=processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(
                        single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=[("<s>", 500), ("</s>", 501)])]),
                    added=special("<s>", "</s>") + [
                        AddedToken("<mask>", lstrip=True, special=True), AddedToken("<end>", rstrip=True, normalized=False),
                        AddedToken("word", single_word=True, normalized=False), AddedToken("é", normalized=True),
                        AddedToken("<both>", lstrip=True, rstrip=True, normalized=False), AddedToken("<", normalized=False),
                        AddedToken("two words", normalized=True)]),
    }


DEEPSEEK_REGEX = "|".join([r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", r"""[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
                           r""" ?[\p{P}\p{S}]+[\r\n]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])


def renderer_families():
    """Tokenizers of families that are in the renderers' fixture only: their control tokens, special or not as published."""
    from tokenizers import AddedToken, Regex, processors
    from tokenizers import pre_tokenizers as pt
    special = lambda *names: [AddedToken(n, special=True, normalized=False) for n in names]
    plain = lambda *names: [AddedToken(n, special=False, normalized=False) for n in names]
    split = lambda *regexes: pt.Sequence([pt.Split(Regex(r), "isolated") for r in regexes] + [pt.ByteLevel(add_prefix_space=False, use_regex=False)])
    post = processors.ByteLevel(trim_offsets=False)
    think = plain("<think>", "</think>")
    wide = lambda *names: [f"<｜{n.replace(' ', '▁')}｜>" for n in names]
    return {
        "glm": dict(vocab=600, pre=split(LLAMA3_REGEX), post=post, added=special("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
                    "<|observation|>", "/nothink") + think + plain("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
                                                                "<arg_value>", "</arg_value>")),
        "minimax": dict(vocab=600, pre=split(O200K_REGEX), post=post, added=special("]~!b[", "]~b]", "[e~[") + think + plain("<minimax:tool_call>", "</minimax:tool_call>")),
        "deepseek": dict(vocab=600, pre=split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_REGEX), post=post, added=special(*wide("begin of sentence", "end of sentence"))
                         + plain(*wide("User", "Assistant", "tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep", "tool outputs begin",
                                       "tool outputs end", "tool output begin", "tool output end"))),
        "kimi": dict(vocab=600, pre=split(O200K_REGEX), post=post, added=special("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
                     + plain("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")),
        "harmony": dict(vocab=600, pre=split(O200K_REGEX), added=special("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
                                                                         "<|end|>", "<|message|>", "<|call|>")),
    }


def make_family_tokenizers():
    texts = corpus()
    for name, spec in renderer_families().items():
        with open(os.path.join(OUT, name + ".tokenizer.json"), "w", encoding="utf-8") as f:
            json.dump(json.loads(build(spec, texts).to_str()), f, ensure_ascii=False, separators=(",", ":"))


def build(spec, texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if spec["vocab"] == 0:
        tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    else:
        tok = Tokenizer(models.BPE(ignore_merges=spec.get("ignore_merges", False)))
    if "norm" in spec:
        tok.normalizer = spec["norm"]
    tok.pre_tokenizer = spec["pre"]
    tok.decoder = decoders.ByteLevel()
    if spec["vocab"] > 0:
        trainer = trainers.BpeTrainer(vocab_size=spec["vocab"], initial_alphabet=alphabet, special_tokens=spec.get("first", []),
                                      show_progress=False)
        tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens([t for t in spec["added"] if t.special])
    tok.add_tokens([t for t in spec["added"] if not t.special])
    if "bos" in spec:
        bos = spec["bos"]
        tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(
            single=bos + " $A", pair=bos + " $A " + bos + " $B:1", special_tokens=[(bos, tok.token_to_id(bos))])])
    elif "post" in spec:
        tok.post_processor = spec["post"]
    return tok


def random_strings(rng, count):
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200),
              (0x1E00, 0x2070), (0x2070, 0x2C00), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB50),
              (0xFB50, 0xFE10), (0xFE20, 0xFFF0), (0x10000, 0x10FFF), (0x11200, 0x11F60), (0x31350, 0x323B0), (0x1E000, 0x1E600), (0x1D100, 0x1D800), (0x1F000, 0x1FAFF), (0x0, 0x20)]
    glue = [" ", "  ", "\n", "'s", "'LL", "12", "e\u0301", "<|im_end|>", "<|endoftext|>", "\r\n", "\t", ".", "word", " the"]
    out = []
    for _ in range(count):
        picked = rng.sample(blocks, rng.randint(1, 4))
        parts = []
        for _ in range(rng.randint(1, 14)):
            if rng.random() < 0.3:
                parts.append(rng.choice(glue))
            else:
                low, high = rng.choice(picked)
                parts.append(chr(rng.randrange(low, high)))
        out.append("".join(parts))
    return out


def make_tokenizers():
    from tokenizers import Tokenizer
    import tokenizers
    os.makedirs(OUT, exist_ok=True)
    texts, rng = corpus(), random.Random(20250101)
    randoms = random_strings(rng, 900)
    cases = {"made_with": "tokenizers " + tokenizers.__version__, "hard": HARD + ["a--b.C!(d[E]Fg hello--"
             " word words sword <mask>  x <end>  y<both> z <s> two words <<mask>> é e\u0301 1234 ABCdef"],
             "invalid": INVALID, "random": randoms, "families": {}}
    for name, spec in families().items():
        tok = build(spec, texts)
        data = json.loads(tok.to_str())
        if name == "gpt2":  # the older spelling of merges
            data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
        path = os.path.join(OUT, name + ".tokenizer.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump(data, f, ensure_ascii=False, separators=(",", ":"))
        tok = Tokenizer.from_file(path)
        enc = lambda s, special=False: tok.encode(s, add_special_tokens=special).ids
        out = {"ids": [enc(s) for s in cases["hard"]], "with_special": [fnv(enc(s, True)) for s in cases["hard"]]}
        out["invalid"] = [enc(bytes.fromhex(s).decode(errors="replace")) for s in INVALID]
        out["random"] = [fnv(enc(s)) for s in randoms]
        out["decoded"] = [tok.decode(ids, skip_special_tokens=True) for ids in out["ids"]]
        out["decoded_all"] = [fnv(tok.decode(ids, skip_special_tokens=False).encode()) for ids in out["ids"]]
        size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
        sequences = [[rng.randrange(size) for _ in range(rng.randint(1, 12))] for _ in range(120)]
        out["random_ids"] = sequences
        out["random_decoded"] = [tok.decode(ids, skip_special_tokens=True) for ids in sequences]
        tok.encode_special_tokens = True
        out["plain"] = [fnv(enc(s)) for s in cases["hard"]]
        cases["families"][name] = out
    with open(os.path.join(OUT, "tokenizer_cases.json"), "w", encoding="utf-8") as f:
        json.dump(cases, f, ensure_ascii=True, separators=(",", ":"))


CLOCK = (2025, 3, 4, 5, 6, 7)  # local time behind strftime_now in the fixtures
TEMPLATES = ["qwen2.5", "qwen3", "llama3.1", "llama3.2", "smollm2", "kitchen_sink", "chatml"]


def make_templates():
    import datetime
    import jinja2
    import transformers
    from transformers.utils.chat_template_utils import _compile_jinja_template
    import text_fixture_cases as cases
    clock = datetime.datetime(*CLOCK)

    def render(source, **variables):
        try:
            template = _compile_jinja_template(source)
            template.environment.globals["strftime_now"] = clock.strftime
            template.globals["strftime_now"] = clock.strftime
            return template.render(**variables)
        except RecursionError:
            raise
        except Exception as error:
            return {"error": type(error).__name__ + ": " + str(error)[:80]}

    out = {"made_with": f"jinja2 {jinja2.__version__}, transformers {transformers.__version__}", "clock": CLOCK,
           "context": cases.CONTEXT, "snippets": [[s, render(s, **cases.CONTEXT)] for s in cases.snippets()], "conversations": [], "renders": {}}
    conversations = cases.conversations()
    for messages, options in conversations:
        out["conversations"].append({"messages": messages, **options})
    for name in TEMPLATES:
        path = os.path.join(OUT, name + ".jinja")
        source = open(path, encoding="utf-8").read()
        rows = []
        for messages, options in conversations:
            variables = {"messages": messages, "tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **options}
            text = render(source, **variables)
            rows.append(text if isinstance(text, dict) else fnv(text.encode()))
        out["renders"][name] = rows
    with open(os.path.join(OUT, "template_cases.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, separators=(",", ":"))
    for name, rows in out["renders"].items():
        print(name, len(rows), "renders,", sum(isinstance(r, dict) for r in rows), "errors")


def make_language():
    import copy
    import jinja2
    import transformers
    from transformers.utils.chat_template_utils import _compile_jinja_template
    import jinja_language_cases as cases

    def render(source):
        """The text, 0 for an error, 1 for one that is left out: it shows an object, a complex number or an integer beyond 127 bits."""
        try:
            text = _compile_jinja_template(source).render(**copy.deepcopy(cases.CONTEXT))  # indent appends to lists in place
        except Exception:
            return 0
        return 1 if re.search(r"0x[0-9a-f]{6}|-0-x-|\d{39}|<bound|mespace|m-e-s-p|<TemplateReference|<LoopContext|\dj\)", text, re.IGNORECASE) else text

    lists = {"values": cases.VALUES, "strings": cases.STRINGS, "objects": cases.OBJECTS, "operands": cases.OPERANDS}
    forms = [[form, values, [1 if cases.is_left_out(form, v) else render("{% set r = " + form.replace("V", v) + " %}" + cases.SHOW)
                              for v in lists[values]]]
             for form, values in cases.forms()]
    out = {"made_with": f"jinja2 {jinja2.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}",
           "context": cases.CONTEXT, "show": cases.SHOW, "lists": lists, "forms": forms,
           "templates": [[t, render(t)] for t in cases.templates()]}
    with open(os.path.join(OUT, "jinja_cases.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, separators=(",", ":"))
    print(sum(len(f[2]) for f in forms), "cases of", len(forms), "forms,", len(out["templates"]), "templates")


RENDERERS = {  # name in the fixture: tokenizer, renderer, options
    "qwen3": ("qwen2", "qwen3", {}), "qwen3_no_thinking": ("qwen2", "qwen3", {"enable_thinking": False}),
    "prime_qwen3": ("qwen2", "prime-qwen3", {}), "llama3": ("llama3", "llama-3", {}),
    "llama3_system_tools": ("llama3", "llama-3", {"tools_in_user_message": False, "date_string": "1 Jan 2020"}),
}


FAMILIES = {
    "glm45": ("glm", "glm-4.5", {}), "glm45_no_thinking": ("glm", "glm-4.5", {"enable_thinking": False}),
    "minimax_m2": ("minimax", "minimax-m2", {}), "minimax_m2_identity": ("minimax", "minimax-m2", {"model_identity": "You are Max.", "thinking_retention": "all"}),
    "deepseek_v3": ("deepseek", "deepseek-v3", {}), "deepseek_r1": ("deepseek", "deepseek-r1", {}), "deepseek_r1_all": ("deepseek", "deepseek-r1", {"thinking_retention": "all"}),
    "qwen35": ("qwen2", "qwen3.5", {"enable_thinking": True}), "qwen35_no_thinking": ("qwen2", "qwen3.5", {"enable_thinking": False}),
    "kimi_k2": ("kimi", "kimi-k2", {}), "qwen36": ("qwen2", "qwen3.6", {"enable_thinking": True}), "qwen36_all": ("qwen2", "qwen3.6", {"preserve_thinking": True}),
    "qwen38": ("qwen2", "qwen3.8", {"enable_thinking": True}), "qwen38_low": ("qwen2", "qwen3.8", {"preserve_thinking": False, "reasoning_effort": "low"}),
    "qwen38_no_thinking": ("qwen2", "qwen3.8", {"enable_thinking": False, "reasoning_effort": "medium"}),
    "gpt_oss": ("harmony", "gpt-oss", {"conversation_start_date": "2025-06-28"}),
    "gpt_oss_all": ("harmony", "gpt-oss", {"conversation_start_date": "2025-06-28", "reasoning_effort": "high", "auto_drop_analysis": False}),
    "gpt_oss_bare": ("harmony", "gpt-oss", {"use_system_prompt": False, "thinking_retention": "all"}),
    "gpt_oss_identity": ("harmony", "gpt-oss", {"conversation_start_date": "1999-12-31", "reasoning_effort": "low", "model_identity": "You are Ossi.", "knowledge_cutoff": "2025-01",
                                                "thinking_retention": "all"}),
}
# The package asks for these at once, though texts have none of them.
EXTRA_TOKENS = dict.fromkeys(["qwen3.5", "qwen3.6", "qwen3.8"], ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])


def renderer_classes():
    from renderers import configs, deepseek_r1, deepseek_v3, glm45, gpt_oss, kimi_k2, llama_3, minimax_m2, prime_qwen3, qwen3, qwen35, qwen36, qwen38
    return {"qwen3": (qwen3.Qwen3Renderer, configs.Qwen3RendererConfig), "prime-qwen3": (prime_qwen3.PrimeQwen3Renderer, configs.PrimeQwen3RendererConfig),
            "llama-3": (llama_3.Llama3Renderer, configs.Llama3RendererConfig), "glm-4.5": (glm45.GLM45Renderer, configs.GLM45RendererConfig),
            "minimax-m2": (minimax_m2.MiniMaxM2Renderer, configs.MiniMaxM2RendererConfig), "deepseek-v3": (deepseek_v3.DeepSeekV3Renderer, configs.DeepSeekV3RendererConfig),
            "deepseek-r1": (deepseek_r1.DeepSeekR1Renderer, configs.DeepSeekR1RendererConfig), "qwen3.5": (qwen35.Qwen35Renderer, configs.Qwen35RendererConfig),
            "qwen3.6": (qwen36.Qwen36Renderer, configs.Qwen36RendererConfig), "qwen3.8": (qwen38.Qwen38Renderer, configs.Qwen38RendererConfig),
            "kimi-k2": (kimi_k2.KimiK2Renderer, configs.KimiK2RendererConfig), "gpt-oss": (gpt_oss.GptOssRenderer, configs.GptOssRendererConfig)}


def make_renderers(table, file, more_conversations, completions, **more):
    """`completions`: for a tokenizer, what a model may say. `more`: members of the file that are there already."""
    import transformers
    import harmony_reference
    import text_fixture_cases as cases
    classes = renderer_classes()
    ints = lambda values: [int(v) for v in values]
    out = {"conversations": [], "renders": {}, "completions": {}, "bridges": {}, **more}
    # Only what both sides define: text that spells special tokens is ordinary text here, and nulls count as absent.
    usable = [(m, o) for m, o in cases.conversations()
              if m and "<|im" not in json.dumps(m) and all(isinstance(x.get("content", 0), str) and x.get("role") in ("system", "user", "assistant", "tool")
                                                            and x.get("reasoning_content", "") is not None and "arguments\": null" not in json.dumps(x) for x in m)]
    for messages, options in usable:
        if "builtin_tools" not in options:
            out["conversations"].append({"messages": messages, "tools": options.get("tools", []), "add_generation_prompt": options["add_generation_prompt"]})
    for messages, tools, add_generation_prompt in more_conversations:
        out["conversations"].append({"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt})
    for name, (tokenizer_name, renderer_name, options) in table.items():
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(OUT, tokenizer_name + ".tokenizer.json"))
        tokenizer.add_special_tokens({"additional_special_tokens": EXTRA_TOKENS.get(renderer_name, [])})
        if renderer_name == "gpt-oss":
            harmony_reference.use_vocabulary_of(tokenizer)
        make, config = classes[renderer_name]
        renderer = make(tokenizer, config(**options))
        rows = []
        for c in out["conversations"]:
            try:
                r = renderer.render(c["messages"], tools=c["tools"] or None, add_generation_prompt=c["add_generation_prompt"])
                rows.append([fnv(ints(r.token_ids)), fnv([i + 1 for i in r.message_indices]), fnv(ints(r.sampled_mask)), fnv(ints(r.is_content))])
            except Exception as error:
                rows.append({"error": str(error)[:80]})
        out["renders"][name] = rows
        out.setdefault("stops", {})[name] = sorted(renderer.get_stop_token_ids())
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        prompts = {p: ints(renderer.render_ids(cases.conversations()[0][0], add_generation_prompt=True)) + encode(p) for p in ("", "<think>\n")}
        parsed, bridged = [], []
        for text in completions(tokenizer_name):
            for prefix, prompt in prompts.items():
                ids = encode(text)
                p = renderer.parse_response(ids, tools=[cases.WEATHER, cases.SEARCH], prompt_ids=prompt)
                parsed.append({"text": text, "prompt": prompt, "ids": ids, "content": p.content, "reasoning": p.reasoning_content,
                               "calls": [[c.name, json.dumps(c.arguments, ensure_ascii=False), getattr(c.status, "value", str(c.status)), c.raw, c.id] for c in p.tool_calls or []]})
                for tail in cases.TAILS:
                    b = renderer.bridge_to_next_turn(prompt, ids, tail)
                    bridged.append(None if b is None else fnv(ints(b.token_ids)))
        out["completions"][name], out["bridges"][name] = parsed, bridged
    out["tails"], out["tools"] = cases.TAILS, [cases.WEATHER, cases.SEARCH]
    with open(os.path.join(OUT, file), "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, separators=(",", ":"))
    for name, rows in out["renders"].items():
        print(name, len(rows), "renders,", sum(isinstance(r, dict) for r in rows), "errors;", len(out["completions"][name]), "completions;",
              sum(b is not None for b in out["bridges"][name]), "of", len(out["bridges"][name]), "bridges")


def main():
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "tokenizers":
        make_tokenizers()
    elif command == "templates":
        make_templates()
    elif command == "language":
        make_language()
    elif command == "renderers":
        import text_fixture_cases as cases
        make_renderers(RENDERERS, "renderer_cases.json", [], lambda tokenizer: cases.COMPLETIONS)
    elif command == "family_tokenizers":
        make_family_tokenizers()
    elif command == "families":
        import harmony_reference
        import text_fixture_cases as cases
        words = ["a ", "Ünï", "\n", "日本", '"', "//", "<|end|>", " b", "\r\n", "1"]
        tools = harmony_reference.tool_cases(3, lambda rng, most: "".join(rng.choices(words, k=rng.randint(0, most))), 80)
        make_renderers(FAMILIES, "renderer_family_cases.json", cases.family_conversations(), cases.family_completions, harmony_tools=tools)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
