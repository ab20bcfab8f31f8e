#!/usr/bin/env python3
"""Environments of both generations of the library, unmodified, in Python workers: under prl eval with a model that does as it is told, and
under prl rl. Needs the virtual environments of python/tests/venvs.py; skipped without them."""
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import harness
from chat_server import Server
from harness import Skip, check

sys.path.insert(0, str(harness.ROOT / "python/tests"))
import venvs

ENVS = harness.ROOT / "tests/python_envs"


def python_of(kind):
    python = venvs.ready(kind)
    if python is None:
        raise Skip(f"no virtual environment {kind}: python3 python/tests/venvs.py {kind} makes it")
    return python


def guess(messages):
    """Halves what the hints leave of 1 to 100."""
    low, high, said = 1, 100, 50
    for message in messages:
        if message["role"] == "assistant":
            said = int(message["content"])
        elif message["content"] == "Higher.":
            low = said + 1
        elif message["content"] == "Lower.":
            high = said - 1
    return str((low + high) // 2)


def answer(body):
    """What solves the environments of tests/python_envs; a judge is content with all of it."""
    if body["model"] == "a-judge":
        return {"content": "yes"}
    messages = body["messages"]
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    question = next(message["content"] for message in messages if message["role"] == "user")
    if tools and messages[-1]["role"] == "tool":
        return {"content": messages[-1]["content"]}
    if tools:
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        name = next(name for name in tools if name == "count" or name.endswith("add"))
        arguments = {"step": numbers[0]} if name == "count" else {"a": numbers[0], "b": numbers[1]}
        call = {"id": f"call_{len(messages)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        return {"content": None, "tool_calls": [call]}
    if "Guess my number" in question:
        # Some rollouts of a question never find it: the seed tells them apart.
        return {"content": "0" if len(messages) == 1 and body.get("seed", 0) % 3 == 0 or messages[-2:-1] and messages[-2]["content"] == "0" else guess(messages)}
    if "reversed_text" in messages[0]["content"]:
        return {"content": f"<reversed_text>{question[::-1]}</reversed_text>"}
    if "times two" in question:
        return {"content": str(2 * int(re.search(r"\d+", question)[0]))}
    return {"content": "as asked"}


def toml(value):
    return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if isinstance(value, dict) else json.dumps(value)


def env_table(section, kind, env_id, **keys):
    keys = {"path": f"{ENVS}:{ENVS / kind}", "python": python_of(kind), "num_workers": 1, **keys}
    return "\n".join([f"[[{section}]]", f'id = "{env_id}"', *(f"{key} = {toml(value)}" for key, value in keys.items())]) + "\n"


def evaluate(folder, environments, judge=None, **top):
    """Evaluates (kind, id, keys) together; rows of each by its id."""
    with Server(answer) as server:
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {"num_examples": 3, "rollouts_per_example": 2, **top}.items()) + f"""
[model]
name = "m"
[client]
base_url = ["{server.url}"]
[sampling]
max_tokens = 64
[save.disk]
path = "{folder}/saved"
"""
        for kind, env_id, keys in environments:
            if "judged" in env_id:
                keys = {**keys, "judge": {"base_url": server.url}}
            text += env_table("env", kind, env_id, **keys)
        (folder / "eval.toml").write_text(text)
        harness.prl("eval", "@", folder / "eval.toml", "--output-dir", folder / "out")
        judged = sum(body["model"] == "a-judge" for body in server.requests)
    rows = {env_id: harness.rows_of(folder / "saved" / env_id / "results.jsonl") for _, env_id, _ in environments}
    for env_id, found in rows.items():
        check(sorted((row["example_id"], row["rollout_idx"]) for row in found) == [(e, r) for e in range(3) for r in range(2)],
              f"{env_id}: each rollout once: {[(row['example_id'], row['rollout_idx']) for row in found]}")
        failed = [row["error"] for row in found if row["error"]]
        check(not failed, f"{env_id}: {failed}")
    return rows, judged


MEANS = """
import json, sys
from verifiers.legacy.utils.metric_utils import PassAtKMetric
rows = [json.loads(line) for line in open(sys.argv[1])]
metric = PassAtKMetric(len(rows) // len({row["example_id"] for row in rows}))
metric.add_outputs(rows)
at, every = metric.compute()
print(json.dumps([sum(row["reward"] for row in rows) / len(rows), at, every]))
"""


def check_means_of_the_library(folder):
    """The library's own evaluation makes the same means of the same rollouts."""
    done = subprocess.run([python_of("legacy"), "-c", MEANS, folder / "results.jsonl"], capture_output=True, text=True, timeout=240)
    check(done.returncode == 0, done.stderr[-2000:])
    mean, at, every = json.loads(done.stdout.splitlines()[-1])
    ours = json.loads((folder / "metadata.json").read_text())
    check(abs(ours["avg_reward"] - mean) < 1e-9, f"{ours['avg_reward']} and {mean}")
    for name, theirs in (("pass_at_k", at), ("pass_all_k", every)):
        check(ours[name].keys() == theirs.keys() and all(abs(ours[name][k] - value) < 1e-9 for k, value in theirs.items()), f"{name}: {ours[name]} and {theirs}")


def test_legacy_environments_are_evaluated():
    with harness.workspace("legacy-envs") as folder:
        # Single turn: judged, ranked and the published one. What prl-reverse-text samples is compared in python_env_test.py.
        environments = [("legacy", "prl-guess", {"args": {"max_turns": 8}, "state_columns": ["guesses"]}),
                        ("legacy", "prl-calculator", {}), ("legacy", "prl-counter", {}), ("legacy", "prl-judged", {}),
                        ("legacy", "prl-ranked", {}), ("legacy", "prl-reasoning-gym", {})]
        rows, judged = evaluate(folder, environments)
        rewards = {env_id: {row["reward"] for row in found} for env_id, found in rows.items()}
        check(all(rewards[env_id] == {1.0} for env_id in ("prl-calculator", "prl-counter", "prl-judged")), f"{rewards}")
        for row in rows["prl-guess"]:
            # Nobody answers the last guess of a rollout that may take no more turns.
            guesses = len(row["info"]["guesses"])
            check(abs(row["reward"] - row["metrics"]["solved"] - 0.25 / guesses) < 1e-9, f"{row['reward']}, {row['metrics']}")
            check(guesses == row["num_turns"] - (row["stop_condition"] == "max_turns_reached"), f"{guesses} of {row['num_turns']}, {row['stop_condition']}")
        check_means_of_the_library(folder / "saved/prl-guess")
        check(max(row["num_turns"] for row in rows["prl-guess"]) > 2, "several turns")
        check(all(row["num_turns"] == 2 and row["tool_defs"] for env_id in ("prl-calculator", "prl-counter") for row in rows[env_id]), "tools were called")
        check(rewards["prl-ranked"] == {1.0}, "replies of one length share the first rank")
        check(rows["prl-reasoning-gym"][0]["prompt"], "a published environment")
        # Rollouts of one question say the same, and the judge is asked at temperature 0: once for each question, twice where both asked at once.
        check(3 <= judged <= 6, f"{judged} calls of the judge")


def test_v1_environments_are_evaluated():
    with harness.workspace("v1-envs") as folder:
        environments = [("v1", "prl-guess-v1", {"agent": {"max_turns": 8}}), ("v1", "prl-calculator-v1", {}),
                        ("v1", "prl-counter-v1", {}), ("v1", "prl-judged-v1", {}), ("v1", "prl-duel-v1", {})]
        rows, judged = evaluate(folder, environments)
        rewards = {env_id: {row["reward"] for row in found} for env_id, found in rows.items()}
        check(all(rewards[f"prl-{name}-v1"] == {1.0} for name in ("calculator", "counter", "judged", "duel")), f"{rewards}")
        for row in rows["prl-guess-v1"]:
            check(abs(row["reward"] - row["metrics"]["solved"] - 0.25 / row["num_turns"]) < 1e-9, f"{row}")
        check(all(row["num_turns"] == 2 for env_id in ("prl-calculator-v1", "prl-counter-v1") for row in rows[env_id]), "tools were called")
        check(3 <= judged <= 6, f"{judged} calls of the judge")


def test_published_v1_environments():
    root = os.environ.get("PRL_PUBLISHED_ENVS")
    if not root:
        raise Skip("PRL_PUBLISHED_ENVS names no checkout of the library's environments")

    def play(body):
        tools = [message for message in body["messages"] if message["role"] == "tool"]
        if "facts_lookup" in [tool["function"]["name"] for tool in body.get("tools") or ()]:
            if tools:
                return {"content": f"<answer>{tools[-1]['content']}</answer>"}
            asked = body["messages"][-1]["content"].split('"')[1]
            return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "facts_lookup", "arguments": json.dumps({"name": asked})}}]}
        return {"content": "[call]" if "[call]" in body["messages"][-1]["content"] else "[check]"}

    with harness.workspace("published") as folder, Server(play) as server:
        for name in ("glossary", "kuhn_poker"):
            harness.prl("eval", "--env.id", name, "--env.path", pathlib.Path(root) / name, "--env.python", python_of("v1"), "--env.num-workers", 1,
                        "--model.name", "m", "--client.base-url", server.url, "--num-examples", 3, "--save.disk.path", folder / name, "--output-dir", folder / "out")
            rows = harness.rows_of(folder / name / "results.jsonl")
            check(len(rows) == 3 and not any(row["error"] for row in rows), f"{name}: {rows}")
            if name == "glossary":
                check({row["reward"] for row in rows} == {1.0}, f"{[row['reward'] for row in rows]}")


MATH_ROLLOUTS = 8
RIGHT_OF_EIGHT = [0, 8, 1, 2, 3, 4, 5, 6, 7, 4]  # rollouts of a question that are right: none, all, and what lies between


class MathReplies:
    """Replies to the questions of math500 and aime2025: which of the eight for a question are right is the same for whoever asks."""

    def __init__(self):
        self.asked, self.lock = {}, threading.Lock()

    def __call__(self, body):
        question = body["messages"][-1]["content"]
        with self.lock:
            place = self.asked[question] = self.asked.get(question, -1) + 1
        half = re.search(r"half of (\d+)", question)
        number = int(half[1]) if half else 0
        answer, right = ((f"{number}/2", f"{number / 2}", f"\\frac{{{number}}}{{2}}"), RIGHT_OF_EIGHT[number // 2]) if half else (
            (("70",), 3) if "7 times 10" in question else (("336",), 8))
        if place < right:
            return {"content": f"I think.\n\n\\boxed{{{answer[place % len(answer)]}}}"}
        if half and right == 2 and place == MATH_ROLLOUTS - 1:
            return 400, "no such reply"
        return {"content": (f"\\boxed{{{number + 1000}}}", f"It is {answer[0]}, but nothing marks it")[place % 2]}


LIBRARY_EVALUATION = """
import json, sys
import verifiers as vf
from datasets import Dataset
url, rollouts, file = sys.argv[1:]
dataset = Dataset.from_list([json.loads(line) for line in open(file)])
env = vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.MathRubric(timeout_seconds=60))
made = env.evaluate_sync(vf.ClientConfig(api_base_url=url, api_key_var="UNSET_KEY", max_retries=0), "m", rollouts_per_example=int(rollouts), max_concurrent=4)
print(json.dumps({key: made["metadata"][key] for key in ("avg_reward", "avg_error", "pass_at_k", "pass_all_k")}
                 | {"failed": sorted(row["error"]["error_chain_str"] for row in made["outputs"] if row["error"])}))
"""


def evaluation_of_the_library(rows, folder):
    """What the library's own evaluation of (question, answer) says of the same replies."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows))
    with Server(MathReplies()) as server:
        done = subprocess.run([python_of("legacy"), "-c", LIBRARY_EVALUATION, server.url, str(MATH_ROLLOUTS), file], capture_output=True, text=True,
                              timeout=400, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")})
    check(done.returncode == 0, done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def test_math_is_evaluated_as_the_library_does():
    python_of("legacy")
    with harness.workspace("math-eval") as folder:
        hub = harness.hub_data_sets(folder / "hub")
        with Server(MathReplies()) as server:
            said = harness.prl("eval", "--model.name", "m", "--environment-ids", "math500,aime2025", "--client.base-url", server.url,
                                 "--num-examples", -1, "--rollouts-per-example", MATH_ROLLOUTS, "--retry.max-attempts", 1, "--retry.reraise", "false",
                                 "--output-dir", folder / "out", cwd=folder, env=hub)
        out = "".join(said)
        metrics = harness.rows_of(folder / "out/metrics.jsonl")
        questions = {"math500": [(row["problem"], row["answer"]) for row in harness.DATA_SETS["HuggingFaceH4/MATH-500"]["test.jsonl"]],
                     "aime2025": [("What is 7 times 10?", "70"), ("What is an angle?", "336")]}
        for env_id, rows in questions.items():
            saved = list((folder / "out/evals").glob(f"{env_id}--m/*/metadata.json"))
            check(len(saved) == 1, f"{saved}")
            ours, theirs = json.loads(saved[0].read_text()), evaluation_of_the_library(rows, folder)
            check(ours["num_examples"] == len(rows) and ours["rollouts_per_example"] == MATH_ROLLOUTS, f"{ours}")
            for key in ("avg_reward", "avg_error"):
                check(abs(ours[key] - theirs[key]) < 1e-9, f"{env_id}: {key} {ours[key]} and {theirs[key]}; the library's failures: {theirs['failed']}")
            check(0 < theirs["avg_reward"] < 1 and (theirs["avg_error"] > 0) == (env_id == "math500"), f"{env_id}: the replies differ: {theirs}")
            logged = {name: value for row in metrics for name, value in row.items() if name.startswith(f"eval/{env_id}/")}
            check(abs(logged[f"eval/{env_id}/avg@{MATH_ROLLOUTS}"] - theirs["avg_reward"]) < 1e-9, f"{logged}")
            check(f"Avg@{MATH_ROLLOUTS}={theirs['avg_reward']:.4f}" in out, out)
            for name in ("pass_at_k", "pass_all_k"):
                check(sorted(ours[name]) == sorted(theirs[name]) == ["1", "2", "4", "8"], f"{env_id}: {name} {ours[name]} and {theirs[name]}")
                check(all(abs(ours[name][k] - value) < 1e-9 for k, value in theirs[name].items()), f"{env_id}: {name} {ours[name]} and {theirs[name]}")
            for k, value in theirs["pass_at_k"].items():
                check(abs(logged[f"eval/{env_id}/pass@{k}"] - value) < 1e-9 and f"Pass@{k}: {value:.4f}" in out, f"{env_id}: pass@{k}: {logged}")


ADVANTAGES = """
def centred(rollouts, scale=1.0):
    rewards = [rollout["reward"] for rollout in rollouts]
    mean = sum(rewards) / len(rewards)
    return [scale * (reward - mean) for reward in rewards]
"""


def test_rl_in_both_generations():
    with harness.workspace("python-rl") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "credit.py").write_text(ADVANTAGES)
        custom = {"type": "custom", "import_path": "credit.centred", "path": str(folder), "kwargs": {"scale": 2.0}}
        config = folder / "rl.toml"
        config.write_text(f"""
max_steps = 3
seq_len = 1024
seed = 3
[model]
name = "{model}"
[trainer.optim]
lr = 1e-3
[orchestrator]
batch_size = 16
group_size = 4
max_async_level = 0
deterministic = true
[orchestrator.train]
filter_zero_advantages = false
[orchestrator.train.sampling]
max_completion_tokens = 8
[inference]
max_num_seqs = 16
[inference.model]
max_model_len = 1024
""" + env_table("orchestrator.train.env", "legacy", "prl-ranked", ratio=1.0, algo=custom)
            + env_table("orchestrator.train.env", "v1", "prl-guess-v1", ratio=1.0, agent={"max_turns": 5}, max_total_completion_tokens=12, algo={"type": "rae"}))
        _, said = harness.prl("rl", "@", config, "--output-dir", folder / "out")
        kls = [float(kl) for kl in re.findall(r"mismatch_kl=([-0-9.e+]+)", said)]
        check(kls and set(kls) == {0.0}, f"tokens and log-probabilities are the sampler's own: mismatch_kl {kls}")
        rows = [row for path in sorted((folder / "out").rglob("train_rollouts.jsonl")) for row in harness.rows_of(path)]
        by_env = {}
        for row in rows:
            by_env.setdefault(row["task"], []).append(row)
        check(not any(row["error"] for row in rows), f"{[row['error'] for row in rows if row['error']]}")
        check(len(rows) >= 48 and len(by_env) == 2, f"{ {name: len(found) for name, found in by_env.items()} }")
        guesses = by_env["prl-guess-v1"]
        for row in guesses:
            # A right guess ends the rollout before the limit, or with its last token.
            is_right = row["stop_condition"] == "user_closed" and row["reward"] > 1
            check(row["completion_len"] <= 12 and (is_right or row["stop_condition"] == "max_total_completion_tokens_reached"),
                  f"{row['completion_len']} {row['stop_condition']} {row['reward']}")
        check(any(row["stop_condition"] == "max_total_completion_tokens_reached" for row in guesses), "no rollout came to the limit")
        groups = {}
        for row in by_env.get("prl-ranked", []):
            groups.setdefault(row["trajectory_id"].rsplit("-", 1)[0], []).append(row)
        for group in groups.values():
            mean = sum(row["reward"] for row in group) / len(group)
            check(all(abs(row["advantage"] - 2 * (row["reward"] - mean)) < 1e-5 for row in group), "advantages of the Python function")


if __name__ == "__main__":
    harness.main(test_legacy_environments_are_evaluated,
                 test_v1_environments_are_evaluated,
                 test_published_v1_environments,
                 test_math_is_evaluated_as_the_library_does,
                 test_rl_in_both_generations)
