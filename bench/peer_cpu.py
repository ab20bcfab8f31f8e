#!/usr/bin/env python3
"""The peer of `prl bench` on the CPU: PyTorch and transformers on the same shape, the same token counts, the same cores.

Prints one JSON object: tokens per second of decoding and of a training step, for each dtype asked for, with every repeat.
Needs torch and transformers in the interpreter that runs it; the project itself needs neither.
"""
import argparse
import json
import platform
import time

import torch
import transformers


def make_model(dtype):
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def time_decode(model, batch, prompt, new, repeats):
    ids = torch.randint(0, 49152, (batch, prompt))
    rates = []
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            marks = []

            class Clock(transformers.StoppingCriteria):
                def __call__(self, input_ids, scores, **kwargs):
                    marks.append(time.perf_counter())
                    return torch.zeros(input_ids.shape[0], dtype=torch.bool)

            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True,
                           top_k=0, pad_token_id=0, eos_token_id=None, stopping_criteria=transformers.StoppingCriteriaList([Clock()]))
            # From the first token on, so that the prompt's pass does not count as decoding.
            if repeat:
                rates.append(batch * (len(marks) - 1) / (marks[-1] - marks[0]))
    return rates


def time_train(model, tokens, repeats):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    length = 512
    ids = torch.randint(0, 49152, (tokens // length, length))
    rates = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if repeat:
            rates.append(tokens / (time.perf_counter() - started))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--train-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
              "threads": torch.get_num_threads(), "rows": []}
    for name in arguments.dtypes.split(","):
        model = make_model(getattr(torch, name)).eval()
        result["rows"].append({"work": "decode_many", "dtype": name, "tokens_per_s": time_decode(
            model, arguments.sequences, arguments.prompt, arguments.new, arguments.repeats)})
        result["rows"].append({"work": "decode_one", "dtype": name, "tokens_per_s": time_decode(
            model, 1, arguments.prompt, arguments.new, arguments.repeats)})
        result["rows"].append({"work": "train", "dtype": name, "tokens_per_s": time_train(
            model, arguments.train_tokens, arguments.repeats)})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
