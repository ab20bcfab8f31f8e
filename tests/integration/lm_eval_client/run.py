#!/usr/bin/env python3
"""Runs the evaluation harness lm-eval against /v1/completions, and holds its numbers against those of the route that training uses.

    tests/integration/lm_eval_client/run.py                      starts `prl inference` on a tiny model
    tests/integration/lm_eval_client/run.py --model FOLDER       on another model

The tasks are made up here and need no hub: multiple choice (log-likelihoods of given answers), perplexity of texts, and greedy text.
Needs the packages of requirements.txt; run outside of such an environment it makes one and starts again there.
"""
import argparse
import json
import math
import os
import pathlib
import random
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import client_venv  # noqa: E402

client_venv.enter("lm-eval", "lm_eval", __file__)
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import harness  # noqa: E402
from harness import check  # noqa: E402

MAX_LENGTH = 256
TASKS = {
    "prl_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "prl_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "prl_greedy": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n", "Question:"]
  max_gen_toks: 24
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
""",
}


def make_tasks(folder, count):
    rng = random.Random(5)
    words = ["copper", "zinc", "naïve", "北京", "seven", "-3.5e2", "tidal", "a b", "😀", "Käse", "\"quoted\"", "x = 1;"]
    folder.mkdir()
    data = folder / "data.jsonl"
    with data.open("w") as lines:
        for _ in range(count):
            choices = rng.sample(words, rng.randint(2, 4))
            row = {"question": " ".join(rng.choices(words, k=rng.randint(1, 12))), "choices": choices, "label": rng.randrange(len(choices)),
                   "text": " ".join(rng.choices(words, k=rng.randint(3, 30)))}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n" + text)


class Direct:
    """The same questions on other routes: /tokenize and /inference/v1/generate."""

    def __init__(self, port):
        self.port = port

    def post(self, path, body):
        status, reply = harness.request(self.port, "POST", path, {"model": "subject", **body})
        check(status == 200, f"{path}: {status} {reply}")
        return reply

    def ids(self, text):
        return self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def scores(self, ids):
        """(log-probability, whether it is the most likely token) for each token but the first."""
        reply = self.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}})
        return [(entry[str(id)]["logprob"], entry[str(id)]["logprob"] == max(e["logprob"] for e in entry.values()))
                for id, entry in zip(ids[1:], reply["prompt_logprobs"][1:], strict=True)]

    def likelihood(self, context, continuation):
        whole, begin = self.ids(context + continuation), len(self.ids(context))
        scores = self.scores(whole)[begin - 1:]
        return sum(score for score, _ in scores), all(is_top for _, is_top in scores)

    def rolling(self, prefix, text):
        return sum(score for score, _ in self.scores([prefix, *self.ids(text)]))

    def greedy(self, context, stops, max_tokens):
        reply = self.post("/v1/completions", {"prompt": self.ids(context), "max_tokens": max_tokens, "temperature": 0, "stop": stops})
        return reply["choices"][0]["text"]


def evaluate(port, model, tasks, folder, concurrent):
    import lm_eval
    from lm_eval.tasks import TaskManager
    arguments = {"model": "subject", "base_url": f"http://127.0.0.1:{port}/v1/completions", "tokenizer_backend": "huggingface", "tokenizer": str(model),
                 "tokenized_requests": True, "num_concurrent": concurrent, "max_retries": 1, "max_length": MAX_LENGTH}
    return lm_eval.simple_evaluate(model="local-completions", model_args=arguments, tasks=tasks, batch_size=1 if concurrent > 1 else 8,
                                   task_manager=TaskManager(include_path=str(folder), include_defaults=False), log_samples=True, bootstrap_iters=0,
                                   cache_requests=False)


def compare(results, direct, prefix):
    """Largest difference of any log-likelihood."""
    worst, accuracy = 0.0, []
    for sample in results["samples"].get("prl_choice", []):
        scores = []
        # Each response may be wrapped once more than the filter's.
        for (context, continuation), response in zip(pairs(sample), sample["filtered_resps"], strict=True):
            wanted, is_greedy = direct.likelihood(context, continuation)
            found, found_greedy = (float(value) if i == 0 else str(value) == "True" for i, value in enumerate(response))
            worst = max(worst, abs(found - wanted))
            check(found_greedy == is_greedy, f"{continuation!r} after {context!r}: greedy {found_greedy}, directly {is_greedy}")
            scores.append(wanted)
        accuracy.append(scores.index(max(scores)) == sample["doc"]["label"])
    if accuracy:
        told = results["results"]["prl_choice"]["acc,none"]
        check(abs(told - sum(accuracy) / len(accuracy)) < 1e-9, f"accuracy {told}, directly {sum(accuracy) / len(accuracy)}")
    total = num_words = 0
    for sample in results["samples"].get("prl_perplexity", []):
        text = sample["doc"]["text"]
        wanted = direct.rolling(prefix, text)
        worst = max(worst, abs(float(sample["filtered_resps"][0]) - wanted))
        total += wanted
        num_words += len(text.split())
    if num_words:
        told, wanted = results["results"]["prl_perplexity"]["word_perplexity,none"], math.exp(-total / num_words)
        check(abs(told / wanted - 1) < 1e-4, f"perplexity {told}, directly {wanted}")
    for sample in results["samples"].get("prl_greedy", []):
        context = sample["arguments"][0][0] if isinstance(sample["arguments"], (list, tuple)) else sample["arguments"]["gen_args_0"]["arg_0"]
        wanted = direct.greedy(context, ["\n", "Question:"], 24)
        check(sample["resps"][0][0] == wanted, f"{sample['resps'][0][0]!r}, directly {wanted!r}")
    return worst


def pairs(sample):
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        return [(entry["arg_0"], entry["arg_1"]) for entry in arguments.values()]
    return [(entry[0], entry[1]) for entry in arguments]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="a model folder; a tiny model with random weights if not given")
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--skip-without-package", action="store_true", help="exit with 77 instead of installing the package")
    options = parser.parse_args()
    import lm_eval
    import transformers
    with harness.workspace("lm-eval") as folder:
        os.environ.update(HF_HOME=str(folder / "hf"), LM_HARNESS_CACHE_PATH=str(folder / "cache"))
        model = options.model or harness.tiny_model(folder / "model")
        make_tasks(folder / "tasks", options.examples)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--model.served-name", "subject", "--model.max-model-len", MAX_LENGTH + 64,
                             "--server.port", port, log=folder / "inference.log") as process:
            harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 120, "the server to start")
            check(process.poll() is None, f"the server ended:\n{(folder / 'inference.log').read_text()[-4000:]}")
            direct = Direct(port)
            for concurrent in (1, 4):  # one uses requests with lists of prompts, the other aiohttp
                begin = time.monotonic()
                results = evaluate(port, model, list(TASKS), folder / "tasks", concurrent)
                worst = compare(results, direct, prefix)
                shown = {task: {name: value for name, value in metrics.items() if name.endswith(",none") and "stderr" not in name}
                         for task, metrics in results["results"].items()}
                print(f"ok    {concurrent} at a time ({time.monotonic() - begin:.1f} s): largest difference of a log-likelihood {worst:.2e}; {json.dumps(shown)}",
                      flush=True)
                check(worst < 1e-4, f"log-likelihoods differ by up to {worst}")
    print(f"lm-eval {lm_eval.__version__}: passed")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except harness.Failure as failure:
        print(f"FAIL  {failure}")
        sys.exit(1)
