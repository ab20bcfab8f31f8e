#!/usr/bin/env python3
"""Environments that others published, from the index of packages, and two agents of one episode that train. Needs the virtual environments and the folder of
python/tests/venvs.py; skipped without them."""
import re
import sys

import harness
from chat_server import Server
from harness import Skip, check
from python_libraries_test import env_table

sys.path.insert(0, str(harness.ROOT / "python/tests"))
import venvs


def play_published(body):
    """Does what the published environments ask for: repeats what is said, calls their tool."""
    messages = body["messages"]
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    bump = next((name for name in tools if name.endswith("bump")), None)
    if bump and sum(message["role"] == "tool" for message in messages) < 3:
        return {"content": None, "tool_calls": [{"id": f"call_{len(messages)}", "type": "function", "function": {"name": bump, "arguments": "{}"}}]}
    asked = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    if "Repeat the user's message" in messages[0]["content"]:
        return {"content": asked}
    return {"content": "<answer>done</answer>" if bump else "An old pond\na frog jumps into it\nthe sound of water"}


# Of both generations, from PyPI: the module, and how many tasks it has at most.
PUBLISHED = {"legacy": {"stardata.envs.constraint-gym": 3}, "v1": {"counter-tool-v1": 1, "echo-user-sim-v1": 1}}


def published():
    folder = venvs.ready("published")
    if folder is None:
        raise Skip("no published environments: python3 python/tests/venvs.py published fetches them")
    return folder


def test_environments_from_the_index():
    """Environments that others wrote, as they lie on PyPI, under prl eval: forms of verse, a tool with state, a user who follows a script. With reasoning-gym's
    in python_libraries_test.py and the two of the next test these are published ones that need no network."""
    with harness.workspace("published") as folder, Server(play_published) as server:
        text = f"""
num_examples = 3
rollouts_per_example = 2
[model]
name = "m"
[client]
base_url = ["{server.url}"]
[save.disk]
path = "{folder}/saved"
"""
        for kind, modules in PUBLISHED.items():
            for module in modules:
                text += env_table("env", kind, module, path=published())
        (folder / "eval.toml").write_text(text)
        harness.prl("eval", "@", folder / "eval.toml", "--output-dir", folder / "out")
        for kind, modules in PUBLISHED.items():
            for module, num_tasks in modules.items():
                rows = harness.rows_of(folder / "saved" / module / "results.jsonl")
                check(sorted((row["example_id"], row["rollout_idx"]) for row in rows) == [(e, r) for e in range(num_tasks) for r in range(2)], f"{module}: {len(rows)} rows")
                check(not any(row["error"] for row in rows), f"{module}: {[row['error'] for row in rows]}")
                rewards = {row["reward"] for row in rows}
                # A haiku is not what all verse forms ask for; the others are solved.
                check(rewards == {1.0} if kind == "v1" else all(0 <= reward <= 1 for reward in rewards) and max(rewards) > 0.3, f"{module}: {rewards}")
        turns = {module: {row["num_turns"] for row in harness.rows_of(folder / "saved" / module / "results.jsonl")} for module in PUBLISHED["v1"]}
        check(turns["counter-tool-v1"] == {4} and turns["echo-user-sim-v1"] == {2}, f"{turns}")


def lock_step(model, batch_size):
    """Two steps over environments that follow."""
    return f"""
max_steps = 2
seq_len = 1024
seed = 3
[model]
name = "{model}"
[orchestrator]
batch_size = {batch_size}
group_size = 2
max_async_level = 0
[orchestrator.train]
filter_zero_advantages = false
[orchestrator.train.sampling]
max_completion_tokens = 8
[inference]
max_num_seqs = {batch_size}
[inference.model]
max_model_len = 1024
"""


def test_rl_in_environments_from_the_index():
    with harness.workspace("published-rl") as folder:
        model = harness.tiny_model(folder / "model")
        config = folder / "rl.toml"
        config.write_text(lock_step(model, 12) + env_table("orchestrator.train.env", "legacy", "stardata.envs.constraint-gym", ratio=1.0, path=published())
            + env_table("orchestrator.train.env", "v1", "echo-v1", ratio=1.0, path=published())
            + env_table("orchestrator.train.env", "v1", "duet-v1", ratio=1.0, path=published()))
        _, said = harness.prl("rl", "@", config, "--output-dir", folder / "out")
        kls = [float(kl) for kl in re.findall(r"mismatch_kl=([-0-9.e+]+)", said)]
        check(kls and set(kls) == {0.0}, f"mismatch_kl {kls}")
        rows = [row for path in sorted((folder / "out").rglob("train_rollouts.jsonl")) for row in harness.rows_of(path)]
        by_env = {}
        for row in rows:
            by_env.setdefault(row["task"], []).append(row)
        check(len(rows) >= 24 and len(by_env) == 3 and not any(row["error"] for row in rows), f"{ {name: len(found) for name, found in by_env.items()} }")
        check(all(row["seat"] == "a" for row in by_env["duet-v1"]), "the seat that may learn")


def test_both_players_of_a_duel_train():
    """Two agents of one v1 episode: a rollout, a reward and a session for each, in lock-step."""
    with harness.workspace("python-duel") as folder:
        model = harness.tiny_model(folder / "model")
        config = folder / "rl.toml"
        config.write_text(lock_step(model, 8) + env_table("orchestrator.train.env", "v1", "prl-duel-v1", algo={"type": "rae"}))
        _, said = harness.prl("rl", "@", config, "--output-dir", folder / "out")
        kls = [float(kl) for kl in re.findall(r"mismatch_kl=([-0-9.e+]+)", said)]
        check(kls and set(kls) == {0.0}, f"mismatch_kl {kls}")
        plays = {}
        for path in sorted((folder / "out").rglob("train_rollouts.jsonl")):
            for row in harness.rows_of(path):
                check(not row["error"], f"{row['error']}")
                plays.setdefault(row["trajectory_id"].split("/")[0], {})[row["seat"]] = row
        check(len(plays) == 8 and all(set(seats) == {"first", "second"} for seats in plays.values()), f"{[sorted(seats) for seats in plays.values()]}")
        check(all(seats["first"]["completion"] != seats["second"]["completion"] for seats in plays.values()), "conversations of their own")
        check(any(seats["first"]["reward"] != seats["second"]["reward"] for seats in plays.values()), "rewards of their own")
        check(all(row["metrics"][f"reward/{seat}"] == row["reward"] for seats in plays.values() for seat, row in seats.items()), "a metric for each")


if __name__ == "__main__":
    harness.main(test_environments_from_the_index,
                 test_rl_in_environments_from_the_index,
                 test_both_players_of_a_duel_train)
