#!/usr/bin/env python3
"""Environments in Python workers: prl eval and rl with the fake one, and with a legacy one against its native twin."""
import contextlib
import json
import pathlib
import random
import re
import struct
import sys

import harness
from harness import Skip, check

sys.path.insert(0, str(harness.ROOT / "python/tests"))
import env_servers
import venvs

ENVS = harness.ROOT / "tests/python_envs"


def only(paths):
    paths = list(paths)
    check(len(paths) == 1, f"wanted one of {paths}")
    return paths[0]


def python_of(kind):
    """The interpreter with that generation of the library, if one was made on this machine."""
    python = venvs.ready(kind)
    if python is None:
        raise Skip(f"no virtual environment {kind}: python3 python/tests/venvs.py {kind} makes it")
    return python


def rl_toml(path, model, env, **top):
    """Lock-step, so that two runs of the same environment are equal."""
    keys = {"max_steps": 3, "seq_len": 512, "seed": 3, **top}
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()) + f"""
[model]
name = {json.dumps(str(model))}
[trainer.optim]
lr = 2e-4
[orchestrator]
batch_size = 8
group_size = 4
max_async_level = 0
deterministic = true
[orchestrator.train.sampling]
max_completion_tokens = 56
[[orchestrator.train.env]]
{env}
[inference]
max_num_seqs = 8
[inference.model]
max_model_len = 512
""")
    return path


TWIN = """
import difflib, json
import verifiers as vf
from datasets import Dataset
from prl_texts import SYSTEM_PROMPT, tag

def load_environment(rows):
    texts = [json.loads(line)["prompt"] for line in open(rows)]

    def score(completion, answer, **kwargs):
        said = next((message.content or "" for message in reversed(completion) if message.role == "assistant"), "")
        return difflib.SequenceMatcher(None, tag(said, "reversed_text"), answer).ratio()

    data = Dataset.from_list([{"question": text, "answer": text[::-1]} for text in texts])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data, system_prompt=SYSTEM_PROMPT, rubric=vf.Rubric(funcs=[score], weights=[1.0]))
"""


V1_TWIN = """
import difflib, json
import verifiers.v1 as vf
from prl_texts import SYSTEM_PROMPT, tag

__all__ = ["TwinTaskset"]

class TwinData(vf.TaskData):
    answer: str

class TwinTask(vf.Task[TwinData]):
    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        return difflib.SequenceMatcher(None, tag(trace.last_reply, "reversed_text"), self.data.answer).ratio()

class TwinConfig(vf.TasksetConfig):
    rows: str = ""

class TwinTaskset(vf.Taskset[TwinTask, TwinConfig]):
    def load(self):
        texts = [json.loads(line)["prompt"] for line in open(self.config.rows)]
        return [TwinTask(TwinData(prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1]), self.config.task) for text in texts]
"""


def write_twin(folder):
    """The native task as an environment of either generation, and rows for all that the warm model gets partly right."""
    rng = random.Random(1)
    words = ["".join(rng.choice("abcd") for _ in range(rng.randint(4, 8))) for _ in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    (folder / "twin.py").write_text(TWIN)
    (folder / "twin_v1.py").write_text(V1_TWIN)


def test_eval_plays_a_python_environment():
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        args = json.dumps({"turns": 2, "misbehave": {"1": "raise", "2": "kill"}})
        _, said = harness.prl("eval", "--model.name", model, "--env.id", "words", "--env.kind", "fake", "--env.args", args, "--env.num-workers", 2,
                              "--num-examples", 6, "--sampling.max-completion-tokens", 8, "--retry.reraise", "false",
                              "--output-dir", folder / "out")
        rows = harness.rows_of(only((folder / "out").rglob("results.jsonl")))
        check(sorted(row["example_id"] for row in rows) == list(range(6)), f"each rollout once: {[r['example_id'] for r in rows]}")
        errors = {row["example_id"]: row["error"]["error"] for row in rows if row["error"]}
        check(set(errors) == {1, 2} and errors[2] == "WorkerDied", f"only the two that misbehave fail: {errors}")
        good = [row for row in rows if not row["error"]]
        check(all(row["num_turns"] == 2 and row["completion_len"] > 0 for row in good), "tokens of both turns are counted")
        check((folder / "out/logs/latest/envs/eval/words.log").exists(), "the log of the workers")
        check("words" in said and "not tried again" in said, f"the log names environment and reason: {said[-2000:]}")


def test_rl_trains_in_a_python_environment():
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        env = 'id = "words"\nkind = "fake"\nnum_workers = 2\nargs = { num_train = 16, turns = 2 }'
        config = rl_toml(folder / "rl.toml", model, env)
        _, said = harness.prl("rl", "@", config, "--output-dir", folder / "out")
        kl = float(re.search(r"mismatch_kl=([-0-9.e+]+)", said).group(1))
        check(kl == 0, f"tokens and log-probabilities are the sampler's own: mismatch_kl {kl}")


def train_rows(folder):
    return [row for path in sorted(folder.rglob("train_rollouts.jsonl")) for row in harness.rows_of(path)]


def test_every_seat_trains():
    """Two agents that learn and one that does not: a rollout, a reward and a session for each learner, in lock-step."""
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        env = ('id = "words"\nkind = "fake"\nnum_workers = 2\ngroup_size = 2\nargs = { num_train = 16, seats = ["first", "second", "_reader"] }\n'
               'algo = { type = "hierarchical_grpo", episode_agents = ["first", "second"] }')
        _, said = harness.prl("rl", "@", rl_toml(folder / "rl.toml", model, env), "--output-dir", folder / "out")
        kls = [float(kl) for kl in re.findall(r"mismatch_kl=([-0-9.e+]+)", said)]
        check(kls and set(kls) == {0.0}, f"mismatch_kl {kls}")
        rows = train_rows(folder / "out")
        check(len(rows) == 24 and not any(row["error"] for row in rows), f"{len(rows)} rollouts for 3 batches of 8")
        plays = {}
        for row in rows:
            plays.setdefault(row["trajectory_id"].split("/")[0], {})[row["seat"]] = row
        check(len(plays) == 12 and all(set(seats) == {"first", "second"} for seats in plays.values()), f"{[sorted(seats) for seats in plays.values()]}")
        for seats in plays.values():
            first, second = seats["first"], seats["second"]
            check(first["num_turns"] == second["num_turns"] == 1 and first["completion"] != second["completion"], "each seat has its own turn")
            mean = (first["reward"] + second["reward"]) / 2
            check(all(abs(row["advantage"] - (row["reward"] - mean)) < 1e-6 for row in (first, second)), f"{first['advantage']} {second['advantage']}")
        last = harness.metrics(folder / "out")[3]
        check("metrics/words/reward/first" in last and "metrics/words/reward/second" in last, f"a reward for each seat: {sorted(last)}")
        check(last["env/words/pss_mb"] <= last["env/words/rss_mb"] and 1 <= last["env/words/workers"] <= 2, f"what the workers use: {sorted(last)}")


CREDIT = """
def length(rollouts, scale):
    return [scale * len(rollout["completion"][-1]["content"]) for rollout in rollouts]

def centred(rollouts, scale):
    mean = sum(rollout["reward"] for rollout in rollouts) / len(rollouts)
    return [scale * (rollout["reward"] - mean) for rollout in rollouts]

def first(rollouts):
    return [rollout["trajectory_id"].endswith("-0") for rollout in rollouts]
"""


def test_rewards_and_filters_in_python():
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "credit.py").write_text(CREDIT)
        env = (f'id = "reverse-text"\nargs = {{ mode = "tiny", num_train = 16 }}\nreward = {{ import_path = "credit.length", path = "{folder}", kwargs = {{ scale = 0.5 }} }}\n'
               f'[[orchestrator.filters]]\ntype = "custom"\nimport_path = "credit.first"\npath = "{folder}"')
        harness.prl("rl", "@", rl_toml(folder / "rl.toml", model, env, max_steps=2), "--output-dir", folder / "out")
        rows = train_rows(folder / "out")
        check(rows and all(abs(row["reward"] - 0.5 * len(row["completion"][-1]["content"])) < 1e-6 for row in rows), f"{[row['reward'] for row in rows]}")
        check(not any(row["trajectory_id"].endswith("-0") for row in rows), "the filter drops the first rollout of each group")
        check(all("env_reward" in row["metrics"] for row in rows), "the environment's own reward stays as a metric")
        found = [row["filters/reverse-text/first"] for step, row in harness.metrics(folder / "out").items() if "reward/all/mean" in row]
        check(found == [0.25] * len(found) and len(found) == 2, f"a quarter of what arrived was found: {found}")


LOSSES = """
import math

def grpo(inputs, clip):
    loss, gradient, clipped = 0.0, [], 0
    for lt, li, advantage, is_member in zip(inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask):
        ratio = math.exp(lt - li)
        loss += -advantage * min(ratio, clip) if is_member else 0.0
        gradient.append(-advantage * ratio if is_member and ratio <= clip else 0.0)
        clipped += is_member and ratio > clip
    return loss, {"clipped": clipped, "tokens": sum(inputs.loss_mask)}, gradient

def broken(inputs):
    raise ArithmeticError("no such loss")

def once(inputs, folder):
    # Raises for whoever comes first, of all processes.
    import pathlib
    try:
        (pathlib.Path(folder) / "raised").touch(exist_ok=False)
    except FileExistsError:
        return grpo(inputs, 8.0)
    raise ArithmeticError("at one rank")

def silent(inputs):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_losses_in_python():
    """grpo written in Python against the native one, in lock-step: the same losses, gradients and, by the later steps, weights."""
    with harness.workspace("python-loss") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "credit.py").write_text(CREDIT)
        (folder / "losses.py").write_text(LOSSES)
        env = (f'id = "reverse-text"\nargs = {{ mode = "tiny", num_train = 16 }}\n'
               f'reward = {{ import_path = "credit.length", path = "{folder}", kwargs = {{ scale = 0.5 }} }}')
        config = rl_toml(folder / "rl.toml", model, env)

        def run(name, *flags, expect=0):
            _, said = harness.prl("rl", "@", config, "--output-dir", folder / name, "--trainer.loss.type", *flags,
                                  expect=expect)
            return said, [row for step, row in sorted(harness.metrics(folder / name).items()) if "loss/mean" in row]

        custom = ["custom", "--trainer.loss.path", folder, "--trainer.loss.import-path"]
        _, native = run("native", "grpo", "--trainer.loss.clip-ratio", 8)
        _, python = run("python", *custom, "losses.grpo", "--trainer.loss.kwargs", '{"clip": 8.0}')
        for name in ("loss/mean", "optim/grad_norm", "mismatch_kl/all/mean", "entropy/all/mean"):
            check([row[name] for row in native] == [row[name] for row in python], f"{name}: {[row[name] for row in native]} and {[row[name] for row in python]}")
        check(len(native) == 3 and all(row["optim/grad_norm"] > 0 for row in native), "something was learnt")
        check(all(row["custom_loss/tokens/mean"] > 0 and row["custom_loss/clipped/mean"] == 0 for row in python), f"{sorted(python[0])}")

        said, steps = run("broken", *custom, "losses.broken", expect=1)
        check("losses.broken" in said and "ArithmeticError: no such loss" in said and not steps, said[-2000:])
        said, steps = run("killed", *custom, "losses.silent", expect=1)
        check("losses.silent" in said and "workers died" in said and not steps, said[-2000:])
        said, _ = run("absent", *custom, "losses.absent", expect=1)
        check("losses.absent" in said and "has no attribute" in said and "rollout" not in said.lower().split("losses.absent")[0], said[-2000:])


def test_functions_in_python_on_three_trainer_ranks():
    """A loss, an advantage, a filter and a reward in Python: three ranks give the numbers and weights of one process; a loss that fails at one of
    them ends the run with the function's name."""
    with harness.workspace("python-ranks") as folder:
        steps = 3
        (folder / "credit.py").write_text(CREDIT)
        (folder / "losses.py").write_text(LOSSES)
        path = json.dumps(str(folder))
        env = (f'id = "reverse-text"\nargs = {json.dumps(harness.ENV_ARGS).replace(": ", " = ")}\n'
               f'reward = {{ import_path = "credit.length", path = {path}, kwargs = {{ scale = 0.5 }} }}\n'
               f'algo = {{ type = "custom", import_path = "credit.centred", path = {path}, kwargs = {{ scale = 2.0 }} }}\n'
               f'[[orchestrator.filters]]\ntype = "custom"\nimport_path = "credit.first"\npath = {path}')
        config = rl_toml(folder / "rl.toml", harness.warm_model(), env, max_steps=steps)

        def run(name, *flags, expect=0, loss="grpo", kwargs='{"clip": 8.0}'):
            _, said = harness.prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", "--trainer.loss.type", "custom", "--trainer.loss.path", folder,
                                  "--trainer.loss.import-path", f"losses.{loss}", "--trainer.loss.kwargs", kwargs, *flags, expect=expect)
            rows = {step: {key: value for key, value in row.items() if key.startswith(("custom_loss/", "loss/", "optim/", "mismatch_kl/", "filters/"))}
                    for step, row in sorted(harness.metrics(folder / name).items())}
            return said, rows

        def ranks():
            return ["--deployment.type", "single_node", "--deployment.num-train-gpus", 3, "--inference.server.port", harness.free_port()]

        _, one = run("one")
        _, three = run("three", *ranks())
        check(one[steps]["custom_loss/tokens/mean"] > 0 and one[steps]["optim/grad_norm"] > 0, f"nothing was learnt: {one[steps]}")
        check(three == one, f"{three} and {one}")
        digests = [harness.tensor_digest(folder / name / f"weights/step_{steps}") for name in ("one", "three")]
        check(digests[0] == digests[1], "three ranks gave other weights than one process")

        # One rank alone has the row that the function does not like: all ranks end, and the message names the function and what it raised.
        said, rows = run("broken", *ranks(), expect=1, loss="once", kwargs=json.dumps({"folder": str(folder)}))
        check("losses.once" in said and "ArithmeticError: at one rank" in said, said[-3000:])
        check(not any("loss/mean" in row for row in rows.values()), f"{rows}")


def test_state_of_an_environment_survives_a_resume():
    """A stateful environment, stopped after step 2 and resumed: the same rollouts and counts as without a stop."""
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        env = 'id = "words"\nkind = "fake"\nnum_workers = 1\nargs = { num_train = 16, stateful = true }'

        def run(name, *flags, **top):
            harness.prl("rl", "@", rl_toml(folder / f"{name}.toml", model, env, **top), "--output-dir", folder / name, "--ckpt.interval", 2, *flags)
            return {int(path.parent.name.split("_")[1]): harness.rows_of(path) for path in (folder / name).rglob("train_rollouts.jsonl")}

        whole = run("whole", max_steps=4)
        run("parts", max_steps=2)
        parts = run("parts", "--ckpt.resume-step", 2, max_steps=4)
        for step in range(1, 5):
            rollouts = [sorted((row["trajectory_id"], json.dumps(row["completion"]), row["reward"]) for row in rows[step]) for rows in (whole, parts)]
            check(rollouts[0] == rollouts[1], f"step {step}: {rollouts}")
            counts = [sorted(row["info"]["done_before"] for row in rows[step]) for rows in (whole, parts)]
            check(counts[0] == counts[1], f"step {step}: the count goes on: {counts}")
        check(min(row["info"]["done_before"] for row in parts[3]) >= 16, "not from 0")


def test_lock_step_equals_the_native_twin():
    """Played by workers of ours and at environment servers of the library."""
    with harness.workspace("python-env") as folder, contextlib.ExitStack() as stack:
        pythons = {"twin": python_of("legacy"), "twin-v1": python_of("v1")}
        model = harness.warm_model()
        write_twin(folder)
        native = f'id = "reverse-text"\nargs = {{ dataset_path = "{folder}/rows.jsonl", eval_dataset_path = "{folder}/rows.jsonl" }}'
        twins = {name: f'id = "{name}"\nname = "reverse-text"\npath = "{folder}:{ENVS}"\npython = "{python}"\nargs = {{ rows = "{folder}/rows.jsonl" }}'
                 for name, python in pythons.items()}
        # The same environments at servers of the library itself; one worker serves these few rollouts, and each takes seconds to import it.
        servers = {name: stack.enter_context(env_servers.environment_server(python, script, name, {"rows": f"{folder}/rows.jsonl"}, (folder,)))
                   for (name, python), script in zip(pythons.items(), (env_servers.LEGACY, env_servers.V1))}
        twins |= {f"{name}-server": f'{twins[name]}\naddress = "{address}"' for name, address in servers.items()}
        seen = {}
        for name, env in {"native": native, **twins}.items():
            _, said = harness.prl("rl", "@", rl_toml(folder / f"{name}.toml", model, env), "--output-dir", folder / name)
            kl = float(re.search(r"mismatch_kl=([-0-9.e+]+)", said).group(1))
            check(kl == 0, f"{name}: mismatch_kl {kl}")
            rows = [row for path in sorted((folder / name).rglob("train_rollouts.jsonl")) for row in harness.rows_of(path)]
            check(len(rows) >= 24 and any(row["reward"] > 0 for row in rows), f"{name}: {len(rows)} rollouts")
            samples = sorted((row["trajectory_id"], json.dumps(row["completion"][0]["content"]), row["reward"]) for row in rows)
            losses = [row["loss/mean"] for step, row in sorted(harness.metrics(folder / name).items()) if "loss/mean" in row]
            seen[name] = (samples, losses)
            check(losses and samples == seen["native"][0], f"{name}: {[pair for pair in zip(samples, seen['native'][0]) if pair[0] != pair[1]][:3]}")
            check(losses == seen["native"][1], f"{name}: the losses differ: {losses} and {seen['native'][1]}")


def test_three_ways_to_the_same_tokens():
    """At temperature 0: calls that come back from a worker, chat with return_token_ids, and /inference/v1/generate."""
    with harness.workspace("python-env") as folder:
        model = harness.warm_model()
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--model.served-name", "m", "--server.port", port, "--model.max-model-len", 512,
                             log=folder / "server.log") as server:
            harness.wait_until(lambda: server.poll() is not None or harness.is_healthy(port), 60, "the server")
            for url in (["--client.base-url", f"http://127.0.0.1:{port}/v1", "--model.name", "m"], ["--model.name", model]):
                saved = folder / f"saved-{len(url)}"
                harness.prl("eval", *url, "--env.id", "words", "--env.kind", "fake", "--env.num-workers", 1, "--env.args", json.dumps({"turns": 3}),
                            "--num-examples", 4, "--sampling.temperature", 0, "--sampling.max-completion-tokens", 16, "--save.disk.path", saved,
                            "--output-dir", folder / "out")
                rows = harness.rows_of(saved / "results.jsonl")
                check(len(rows) == 4 and all(row["num_turns"] == 3 for row in rows), f"{rows}")
                for row in rows:
                    messages, num_tokens = list(row["prompt"]), 0
                    for said in row["completion"]:
                        if said["role"] != "assistant":
                            messages.append(said)
                            continue
                        status, chat = harness.request(port, "POST", "/v1/chat/completions", {
                            "model": "m", "messages": messages, "temperature": 0, "max_tokens": 16, "return_token_ids": True, "logprobs": True})
                        check(status == 200, chat)
                        choice = chat["choices"][0]
                        check((choice["message"]["content"] or "") == (said["content"] or ""), f"{choice['message']} and {said}")
                        status, made = harness.request(port, "POST", "/inference/v1/generate", {
                            "model": "m", "token_ids": chat["prompt_token_ids"], "sampling_params": {"temperature": 0, "max_tokens": 16, "logprobs": 1}})
                        check(status == 200, made)
                        check(made["choices"][0]["token_ids"] == choice["token_ids"], f"{made['choices'][0]['token_ids']} and {choice['token_ids']}")
                        logprobs = [[item["logprob"] for item in reply["logprobs"]["content"]] for reply in (made["choices"][0], choice)]
                        check(logprobs[0] == logprobs[1], f"{logprobs}")
                        num_tokens += len(choice["token_ids"])
                        messages.append(said)
                    check(row["token_usage"]["output_tokens"] == num_tokens, f"{row['token_usage']}, {num_tokens} by the other ways")


def test_trained_tokens_are_those_of_the_server():
    """Ids and log-probabilities of rollouts whose calls came back from a worker, against the other two ways, with the same weights."""
    with harness.workspace("python-env") as folder:
        model = harness.warm_model()
        env = 'id = "words"\nkind = "fake"\nnum_workers = 1\nargs = { num_train = 16, turns = 3 }'
        config = rl_toml(folder / "rl.toml", model, env, max_steps=1)
        harness.prl("rl", "@", config, "--output-dir", folder / "out", "--orchestrator.log-tokens", "--orchestrator.train.filter-zero-advantages", "false")
        rows, samples = train_rows(folder / "out"), harness.rows_of(only((folder / "out").rglob("train_tokens.jsonl")))
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--model.served-name", "m", "--server.port", port, "--model.max-model-len", 512,
                             log=folder / "server.log") as server:
            harness.wait_until(lambda: server.poll() is not None or harness.is_healthy(port), 60, "the server")
            for sample in samples:
                row, ids = rows[sample["row"]], sample["token_ids"]
                status, scored = harness.request(port, "POST", "/inference/v1/generate", {
                    "model": "m", "token_ids": ids, "sampling_params": {"temperature": 1, "max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}})
                check(status == 200, scored)
                theirs = [0.0] + [next(iter(place.values()))["logprob"] for place in scored["prompt_logprobs"][1:]]
                ours = [(i, ours) for i, (ours, mask) in enumerate(zip(sample["inference_logprobs"], sample["loss_mask"])) if mask]
                check(ours and all(f32(theirs[i]) == f32(logprob) for i, logprob in ours), f"{[(i, theirs[i], logprob) for i, logprob in ours if theirs[i] != logprob][:3]}")
                messages, num_found = list(row["prompt"]), 0
                for said in row["completion"]:
                    if said["role"] == "assistant":
                        status, chat = harness.request(port, "POST", "/v1/chat/completions", {
                            "model": "m", "messages": messages, "temperature": 0, "max_tokens": 1, "return_token_ids": True, "logprobs": True})
                        check(status == 200, chat)
                        prompt = chat["prompt_token_ids"]
                        num_found += ids[:len(prompt)] == prompt
                    messages.append(said)
                check(num_found > 0, "the ids in front of a reply are those that the server renders")


def f32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def test_without_python_there_is_one_line():
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "bin").mkdir()
        _, said = harness.prl("eval", "--model.name", model, "--env.id", "words", "--env.kind", "fake", "--output-dir", folder / "out",
                              env={"PATH": str(folder / "bin"), "VIRTUAL_ENV": ""}, expect=1)
        check("needs Python 3.11 or newer" in said and said.count("ERROR") == 1, said)
        _, said = harness.prl("eval", "--model.name", model, "--env.id", "some-env", "--output-dir", folder / "out", expect=1,
                              env={"PRL_ENVIRONMENTS": str(folder / "none")})
        check("prl env install some-env" in said, said)
        harness.prl("eval", "--model.name", model, "--env.id", "reverse-text", "--num-examples", 2, "--sampling.max-completion-tokens", 4,
                    "--output-dir", folder / "out2", env={"PATH": str(folder / "bin"), "VIRTUAL_ENV": ""})


def listeners(port):
    """The workers that listen at the port; to ask the port would end them."""
    lines = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().decode(errors="replace"))
    return [line for line in lines if "prl_worker" in line and f"127.0.0.1:{port}" in line]


def test_workers_elsewhere():
    with harness.workspace("python-env") as folder:
        model = harness.tiny_model(folder / "model")
        port = harness.free_port()
        token = {"PRL_ENV_TOKEN": "secret"}
        # Whoever may write into the temporary folder of a machine has no module in its workers.
        (folder / "tmp").mkdir()
        (folder / "tmp" / "asyncio.py").write_text("raise SystemExit('a module of the temporary folder')\n")
        (folder / "mine").mkdir()
        (folder / "mine" / "words.py").write_text("")
        (folder / "mine" / "sitecustomize.py").write_text(f"open({str(folder / 'seen')!r}, 'w')\n")
        with harness.running("env-server", "--env.id", "words", "--env.kind", "fake", "--address", f"127.0.0.1:{port}", "--num-workers", 2,
                             "--env.path", folder / "mine",
                             env={**token, "TMPDIR": str(folder / "tmp")}, log=folder / "server.log") as server:
            harness.wait_until(lambda: (folder / "server.log").read_text().count("listening on") == 2, 60, "two workers that listen")
            said = "".join(harness.prl("env-server", "--env.id", "words", "--env.kind", "fake", "--address", f"127.0.0.1:{port}",
                                       env=token, expect=None))
            check(f"cannot listen on 127.0.0.1:{port}" in said, said[-1000:])
            harness.prl("eval", "--model.name", model, "--env.id", "words", "--env.kind", "fake", "--num-examples", 4,
                        "--env.address", f"127.0.0.1:{port}, 127.0.0.1:{port + 1}", "--sampling.max-completion-tokens", 4,
                        "--output-dir", folder / "out", env=token)
            harness.wait_until(lambda: (folder / "server.log").read_text().count("listening on") == 4, 60, "those that follow them")
            check(listeners(port), "workers that can be seen")
            server.kill()
            harness.wait_until(lambda: not listeners(port) and not listeners(port + 1), 5, "the end of a killed server's workers")
        rows = harness.rows_of(only((folder / "out").rglob("results.jsonl")))
        check(len(rows) == 4 and not any(row["error"] for row in rows), f"{rows}")
        check((folder / "seen").exists(), "modules of the server's path are found")


if __name__ == "__main__":
    harness.main(test_eval_plays_a_python_environment,
                 test_rl_trains_in_a_python_environment,
                 test_every_seat_trains,
                 test_rewards_and_filters_in_python,
                 test_losses_in_python,
                 test_functions_in_python_on_three_trainer_ranks,
                 test_state_of_an_environment_survives_a_resume,
                 test_lock_step_equals_the_native_twin,
                 test_three_ways_to_the_same_tokens,
                 test_trained_tokens_are_those_of_the_server,
                 test_without_python_there_is_one_line,
                 test_workers_elsewhere)
