#!/usr/bin/env python3
"""What the other commands and keys do with environments in Python: prl synthesize, evaluations during training, extra_body, filters of echo."""
import json

import harness
from chat_server import Server
from harness import check
from python_env_test import only, rl_toml, train_rows


def fake_env(**keys):
    return "\n".join(['id = "words"', 'kind = "fake"', "num_workers = 1", *(f"{key} = {value}" for key, value in keys.items())])


def backwards(body):
    return {"content": next(message["content"] for message in body["messages"] if message["role"] == "user").split()[-1][::-1]}


def test_synthesize_with_a_python_environment():
    """Rows of a Python environment, of a model that solves it, and a second run that finds them there; SFT reads them as they are."""
    with harness.workspace("python-synth") as folder, Server(backwards) as server:
        command = ["synthesize", "--model.name", "m", "--client.base-url", server.url, "--env.id", "words", "--env.kind", "fake", "--env.num-workers", 2,
                   "--env.args", json.dumps({"num_train": 6, "turns": 2, "misbehave": {"4": "raise"}}), "--num-examples", 6, "--rollouts-per-example", 2,
                   "--sampling.extra-body", '{"top_k": 7, "own_field": "x"}', "--save.disk.path", folder / "data", "--output-dir", folder / "out"]
        harness.prl(*command, expect=1)  # a group failed
        rows = harness.rows_of(folder / "data/results.jsonl")
        check(sorted(row["example_id"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3, 5, 5], f"all but the task that fails: {[row['example_id'] for row in rows]}")
        check(all(row["reward"] == 1.0 and [message["role"] for message in row["completion"]] == ["assistant", "user", "assistant"] for row in rows), f"{rows[0]}")
        check(server.requests and all(body["top_k"] == 7 and body["own_field"] == "x" for body in server.requests), f"extra_body reaches the server: {server.requests[0]}")
        asked = len(server.requests)
        harness.prl(*command, expect=1)
        check(len(harness.rows_of(folder / "data/results.jsonl")) == 10 and len(server.requests) <= asked + 4, "what was there is not made again")
        model = harness.tiny_model(folder / "model")
        harness.prl("sft", "--model.name", model, "--data.name", folder / "data/results.jsonl", "--data.batch-size", 2, "--data.seq-len", 256,
                    "--max-steps", 1, "--output-dir", folder / "sft")


def test_evaluations_during_training():
    with harness.workspace("python-evals") as folder:
        model = harness.tiny_model(folder / "model")
        env = fake_env(args="{ num_train = 16 }") + """
[orchestrator.eval]
interval = 2
num_examples = 4
group_size = 2
[orchestrator.eval.sampling]
max_completion_tokens = 6
[[orchestrator.eval.env]]
id = "words"
name = "held-out"
kind = "fake"
num_workers = 1
args = { num_eval = 8, turns = 2, misbehave = { 3 = "kill" } }
"""
        _, said = harness.prl("rl", "@", rl_toml(folder / "rl.toml", model, env, max_steps=4), "--output-dir", folder / "out")
        metrics = harness.metrics(folder / "out")
        evaluated = {step: {key: value for key, value in row.items() if key.startswith("eval/held-out/")} for step, row in metrics.items()}
        evaluated = {step: row for step, row in evaluated.items() if row}
        check(sorted(evaluated) == [0, 2, 4], f"before, during and after: {sorted(evaluated)}")
        for step, row in evaluated.items():
            check(any(key.startswith("eval/held-out/avg@2") or key.endswith("reward/mean") for key in row), f"{sorted(row)}")
        rows = [row for path in (folder / "out").rglob("eval_rollouts.jsonl") for row in harness.rows_of(path)]
        check(len(rows) == 3 * 8, f"{len(rows)} rows")
        dead = [row for row in rows if row["error"]]
        check({row["example_id"] for row in dead} == {3} and len(dead) == 6, f"the task that kills its workers, each time: {[(row['example_id'], row['error']) for row in dead]}")
        check(all(row["num_turns"] == 2 and row["completion_len"] <= 12 for row in rows if not row["error"]), "the evaluation's own sampling and turns")


def test_extra_body_reaches_the_sampler():
    """`stop` of extra_body, through the configuration and a worker's call back, to the sampler in the process and to a server."""
    letters = ["a", "e", "i", "o", "t", "s", "n", "r"]
    with harness.workspace("python-extra") as folder:
        model = harness.tiny_model(folder / "model")
        for name, flags in (("inside", []), ("server", ["--deployment.type", "single_node", "--inference.server.port", harness.free_port()])):
            text = f'{fake_env(args="{ num_train = 16 }")}\nsampling = {{ max_completion_tokens = 24, extra_body = {{ stop = {json.dumps(letters)} }} }}'
            harness.prl("rl", "@", rl_toml(folder / "rl.toml", model, text, max_steps=1), "--output-dir", folder / name,
                        "--orchestrator.train.filter-zero-advantages", "false", *flags)
            rows = train_rows(folder / name)
            replies = [row["completion"][0]["content"] or "" for row in rows]
            # Its tokens are trained on, so a stop text stays at the end of the reply.
            check(len(rows) == 8 and not any(letter in reply[:-1] for letter in letters for reply in replies), f"{name}: {replies}")
            check(any(reply[-1:] in letters for reply in replies), f"{name}: {replies}")
            check(any(row["completion_len"] < 24 for row in rows), f"{name}: a stop came before the limit: {[row['completion_len'] for row in rows]}")


ECHO = """
def first_of_each(rollout, count):
    masks = []
    for branch in rollout["branches"]:
        left, mask = count, []
        for role in branch["roles"]:
            mask.append(role == "user" and left > 0)
            left -= mask[-1]
        masks.append(mask)
    return masks

def short(rollout):
    return [[True]]
"""


def test_filters_of_echo():
    """Of the user's words after the first reply, the cross entropy gets as many tokens as the filter keeps."""
    with harness.workspace("python-echo") as folder:
        model = harness.warm_model()  # its replies are text, so that a prompt continues the tokens of the turn before
        (folder / "words.py").write_text(ECHO)

        def run(name, filtered, expect=0):
            env = fake_env(args="{ num_train = 16, turns = 2 }", algo=f'{{ type = "echo", roles = {{ user = {{ alpha = 0.5 }} }}{filtered} }}')
            _, said = harness.prl("rl", "@", rl_toml(folder / "rl.toml", model, env, max_steps=1), "--output-dir", folder / name, "--trainer.enable-token-export",
                                  expect=expect)
            tokens = [row for path in (folder / name).rglob("rank_0.jsonl") for row in harness.rows_of(path)]
            return said, tokens

        def weighed(rows):
            """How many tokens of each sequence take part in the cross entropy."""
            return [num for row in rows if (num := sum(weight != 0 for weight in row["ce_weights"]))]

        _, everything = run("all", "")
        path = f'path = "{folder}"'
        _, some = run("some", f', filter = {{ import_path = "words.first_of_each", {path}, kwargs = {{ count = 3 }} }}')
        check(weighed(everything) and min(weighed(everything)) > 3, f"{weighed(everything)} of {len(everything)}")
        check(len(weighed(some)) == len(weighed(everything)) and set(weighed(some)) == {3}, f"{weighed(some)}")
        said, _ = run("short", f', filter = {{ import_path = "words.short", {path} }}', expect=1)
        check("words.short returned 1 booleans" in said, said[-2000:])


if __name__ == "__main__":
    harness.main(test_synthesize_with_a_python_environment,
                 test_evaluations_during_training,
                 test_extra_body_reaches_the_sampler,
                 test_filters_of_echo)
