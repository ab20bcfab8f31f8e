#!/usr/bin/env python3
"""The peer of `prl bench`: PyTorch and transformers on the same shape, the same token counts and the same device.

Prints one JSON object: tokens per second of decoding and of a training step, for each dtype asked for, with every repeat.
Needs torch and transformers in the interpreter that runs it; the project itself needs neither.
"""
import argparse
import json
import platform
import time

import torch
import transformers

SHAPES = {
    "smollm2-135m": ("Llama", dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                                   num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True)),
    "qwen3-0.6b": ("Qwen3", dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                                 num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True)),
    "qwen3-4b": ("Qwen3", dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True)),
    "qwen3-8b": ("Qwen3", dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False)),
    "qwen3-30b-a3b": ("Qwen3Moe", dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
                                       num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
                                       num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)),
}


def make_model(arguments, dtype):
    family, sizes = SHAPES[arguments.shape]
    sizes = {**sizes, "num_hidden_layers": arguments.layers or sizes["num_hidden_layers"]}
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # in two types at once a large model would not fit
    try:
        with torch.device(arguments.device):
            return getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(torch.float32)


def now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_decode(model, batch, arguments):
    ids = torch.randint(0, model.config.vocab_size, (batch, arguments.prompt), device=arguments.device)
    rates = []
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 1):
            marks = []

            class Clock(transformers.StoppingCriteria):
                def __call__(self, input_ids, scores, **kwargs):
                    marks.append(now(arguments.device))
                    return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=arguments.new, min_new_tokens=arguments.new,
                           do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None,
                           stopping_criteria=transformers.StoppingCriteriaList([Clock()]))
            # From the first token on, so that the prompt's pass does not count as decoding.
            if repeat:
                rates.append(batch * (len(marks) - 1) / (marks[-1] - marks[0]))
    return rates


def time_train(model, arguments):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=arguments.device == "cuda")
    tokens, length = arguments.train_tokens, min(arguments.sequence_tokens, arguments.train_tokens)
    ids = torch.randint(0, model.config.vocab_size, (tokens // length, length), device=arguments.device)
    rates = []
    for repeat in range(arguments.repeats + 1):
        started = now(arguments.device)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if repeat:
            rates.append(tokens / (now(arguments.device) - started))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--suites", default="decode,train")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--train-tokens", type=int, default=4096)
    parser.add_argument("--sequence-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    suites = arguments.suites.split(",")
    result = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
              "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor(),
              "threads": torch.get_num_threads(), "rows": []}
    for name in arguments.dtypes.split(","):
        model = make_model(arguments, getattr(torch, name)).eval()
        add = lambda work, rates: result["rows"].append({"work": work, "dtype": name, "tokens_per_s": rates})
        if "decode" in suites:
            add("decode_many", time_decode(model, arguments.sequences, arguments))
            add("decode_one", time_decode(model, 1, arguments))
        if "train" in suites:
            add("train", time_train(model, arguments))
        del model
    print(json.dumps(result))


if __name__ == "__main__":
    main()
