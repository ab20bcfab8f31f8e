#!/usr/bin/env python3
"""prl eval, synthesize and results: against servers that speak OpenAI's protocol, and against model folders in the process."""
import json
import os
import re
import shutil
import signal
import threading
import time

import harness
from chat_server import Server
from harness import check

SUMS = {"mode": "sums", "num_train": 12, "num_eval": 8, "max_number": 9, "max_steps": 2}


def solve(body):
    """The right answer to a sum of SUMS, with reasoning in a field of its own."""
    question = body["messages"][-1]["content"]
    terms = re.findall(r"[-+*] ?\d+|\d+", question)
    total = int(terms[0])
    for term in terms[1:]:
        number = int(term[1:])
        total = total + number if term[0] == "+" else total - number if term[0] == "-" else total * number
    return {"content": f"\\boxed{{{total}}}", "reasoning": f"I add up to {total}."}


def search(body):
    """Looks up the page of the question's name, reads its first section and answers with that."""
    last = body["messages"][-1]
    call = lambda tool, **arguments: {"content": None, "tool_calls": [
        {"id": f"call_{len(body['messages'])}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}]}
    if last["role"] == "user":
        return call("search_pages", query=last["content"])
    found = last["content"]
    if found.startswith("[") and "page_id" in found:
        return call("view_sections", page_id=json.loads(found)[0]["page_id"])
    if found.startswith("["):
        return call("read_section", section_id=json.loads(found)[0]["section_id"])
    return {"content": found}


def run(*arguments, **options):
    """What prl says, on both streams."""
    return "".join(harness.prl(*arguments, **options))


def only(paths):
    paths = list(paths)
    check(len(paths) == 1, f"wanted one of {paths}")
    return paths[0]


def eval_toml(path, servers, **top):
    keys = {"rollouts_per_example": 2, **top}
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in SUMS.items())
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()) + f"""
[model]
name = "m"
[client]
base_url = {json.dumps([server.url for server in servers])}
api_key_var = "MY_KEY"
headers = {{ "X-Team" = "blue" }}
headers_from_env = {{ "X-From" = "MY_HEADER" }}
extra_headers_from_state = {{ "X-Example" = "example_id" }}
[sampling]
temperature = 1.0
max_tokens = 32
extra_body = {{ top_k = 7, guided = {{ kind = "x" }} }}
[retry]
max_attempts = 4
wait_min = 0.01
wait_multiplier = 0.01
wait_max = 0.05
[[env]]
id = "gsm8k-synthetic"
args = {{ {args} }}
""")
    return path


ENVIRONMENT = {"MY_KEY": "secret", "MY_HEADER": "from the environment"}


def test_two_servers_share_two_environments():
    with harness.workspace("eval") as folder, Server(solve) as first, Server(solve) as second:
        config = eval_toml(folder / "eval.toml", [first, second])
        config.write_text(config.read_text() + '[[env]]\nid = "math-env"\nname = "other"\nnum_examples = 3\n'
                          f'args = {{ mode = "sums", max_number = 9, num_train = 5, num_eval = 5, seed = 3 }}\n')
        out = run("eval", "@", config, "--output-dir", folder / "out", env=ENVIRONMENT)
        check("Evaluated gsm8k-synthetic" in out and "Avg@2=1.0000" in out and "Pass@2: 1.0000" in out, out)
        results = only((folder / "out/evals").glob("gsm8k-synthetic--m/*/results.jsonl"))
        check(re.fullmatch("[0-9a-f]{8}", results.parent.name), results.parent.name)
        rows = harness.rows_of(results)
        check(sorted((row["example_id"], row["rollout_idx"]) for row in rows) == [(e, r) for e in range(8) for r in range(2)], "rows")
        for key in ("prompt", "completion", "task", "reward", "generation_ms", "scoring_ms", "total_ms", "info", "answer",
                    "completion_len", "is_truncated", "correct_answer", "oai_tools", "metrics", "timing", "stop_condition", "error"):
            check(key in rows[0], f"rows have no {key}")
        check(rows[0]["completion"][0]["reasoning_content"].startswith("I add"), "the reasoning is lost")
        metadata = json.loads((results.parent / "metadata.json").read_text())
        wanted = {"env_id": "gsm8k-synthetic", "env_args": SUMS, "model": "m", "num_examples": 8, "rollouts_per_example": 2, "avg_reward": 1.0,
                  "avg_error": 0.0, "pass_at_k": {"1": 1.0, "2": 1.0}, "pass_all_k": {"1": 1.0, "2": 1.0}, "is_complete": True}
        check({key: metadata[key] for key in wanted} == wanted, metadata)
        check(metadata["sampling_args"] == {"temperature": 1.0, "max_tokens": 32, "top_k": 7, "guided": {"kind": "x"}}, metadata)
        traces = harness.rows_of(results.parent / "traces.jsonl")
        check(len(traces) == 16 and traces[0]["traces"][0]["rewards"]["reward"]["score"] == 1.0, "traces")
        check(len(harness.rows_of(only((folder / "out/evals").glob("other--m/*/results.jsonl")))) == 6, "the second environment")
        check(len(first.requests) == len(second.requests) == 11, f"{len(first.requests)} and {len(second.requests)} requests")
        body, headers = first.requests[0], first.headers[0]
        check(body["temperature"] == 1.0 and body["max_tokens"] == 32 and body["top_k"] == 7 and body["guided"] == {"kind": "x"}, body)
        check(headers["Authorization"] == "Bearer secret" and headers["X-Team"] == "blue", headers)
        check(headers["X-From"] == "from the environment" and headers["X-Example"].isdigit(), headers)
        metrics = harness.rows_of(folder / "out/metrics.jsonl")
        check(any(row.get("eval/gsm8k-synthetic/avg@2") == 1.0 and row.get("eval/gsm8k-synthetic/pass@1") == 1.0 for row in metrics), metrics)
        listed = run("results", folder / "out")
        check("gsm8k" in listed and "other" in listed and "pass@2 1.000" in listed, listed)
        shown = run("eval", "show", results.parent, "--show", 1)
        check("What is" in shown and "reward 1.0000" in shown and "I add up to" in shown, shown)


def test_what_fails_is_tried_again_unless_it_cannot_succeed():
    fails = [503, 500, 429]

    def answer(body):
        return (fails.pop(), "later") if fails else solve(body)

    with harness.workspace("retry") as folder, Server(answer) as server:
        config = eval_toml(folder / "eval.toml", [server], max_concurrent=1)
        harness.prl("eval", "@", config, "--output-dir", folder / "out", env=ENVIRONMENT)
        check(len(server.requests) == 16 + 3, f"{len(server.requests)} requests")
    with harness.workspace("refused") as folder, Server(lambda _: (401, "wrong key")) as server:
        config = eval_toml(folder / "eval.toml", [server], max_concurrent=1)
        started = time.monotonic()
        errors = run("eval", "@", config, "--output-dir", folder / "out", env=ENVIRONMENT, expect=1)
        check("wrong key" in errors and len(server.requests) == 1, f"{len(server.requests)} requests: {errors}")
        check(time.monotonic() - started < 10, "a wrong key was waited for")
        errors = run("eval", "@", config, "--env.id", "gsm9k", env=ENVIRONMENT, expect=1)
        check("gsm9k" in errors, errors)


def test_an_interrupted_evaluation_goes_on():
    gate = threading.Event()
    count = [0]

    def answer(body):
        count[0] += 1
        if count[0] > 5:
            gate.wait(90)
        return solve(body)

    with harness.workspace("resume") as folder, Server(answer) as server:
        config = eval_toml(folder / "eval.toml", [server], max_concurrent=2)
        kept = folder / "kept"
        arguments = ["eval", "@", config, "--output-dir", folder / "out", "--save.disk.path", kept]
        with harness.running(*arguments, env=ENVIRONMENT, log=folder / "log") as process:
            harness.wait_until(lambda: count[0] >= 7, 30, "the stalled requests")
            process.send_signal(signal.SIGINT)
            check(process.wait(90) == 130 or process.returncode == 1, f"exit status {process.returncode}")
        gate.set()
        num_kept = len(harness.rows_of(kept / "results.jsonl"))
        check(num_kept == 5, f"{num_kept} rows were kept")
        errors = run(*arguments, env=ENVIRONMENT, expect=1)
        check("holds results already" in errors, errors)
        with open(kept / "results.jsonl", "a") as stream:
            stream.write('{"example_id": 3, "rollo')
        before = len(server.requests)
        resume = ["eval", "@", config, "--output-dir", folder / "out", "--resume-path", kept]
        out = run(*resume, env=ENVIRONMENT)
        check("Avg@2=1.0000" in out and len(server.requests) - before == 11, f"{len(server.requests) - before} requests: {out}")
        check(len(harness.rows_of(kept / "results.jsonl")) == 16, "rows")
        errors = run(*resume, "--rollouts-per-example", 3, env=ENVIRONMENT, expect=1)
        check("rollouts_per_example" in errors, errors)


def test_a_run_is_followed_while_it_writes_its_steps():
    with harness.workspace("followed") as folder:
        model, data = harness.tiny_model(folder / "model"), harness.sft_data(folder / "data.jsonl", 64)
        common = ["evals", "--model", model, "--eval.env.0.id", "gsm8k-synthetic", "--eval.env.0.args", json.dumps(SUMS), "--eval.num-examples", 2,
                  "--eval.sampling.max-completion-tokens", 8]
        out = run(*common, "--output-dir", folder / "once")
        check(len(re.findall("Evaluated", out)) == 1 and "[step" not in out, out)
        # It begins before the run: there is no folder of weights yet.
        follow = [*common, "--eval.interval", 4, "--output-dir", folder / "evals", "--online.broadcasts-dir", folder / "run/weights"]
        errors = run(*follow, expect=1)
        check("online.broadcasts_dir" in errors and "in no folder" in errors, errors)
        (folder / "run").mkdir()
        metrics = folder / "evals/metrics.jsonl"
        sft = ["sft", "--model.name", model, "--data.name", data, "--data.seq-len", 128, "--data.batch-size", 2, "--ckpt.interval", 1,
               "--optim.lr", "5e-3", "--output-dir", folder / "run"]
        with harness.running(*follow, "--online.max-steps", 7, log=folder / "follow.log") as process:
            harness.wait_until(lambda: len(harness.rows_of(metrics)) == 1, 60, "the evaluation of the base model")
            harness.prl(*sft, "--max-steps", 4)
            harness.wait_until(lambda: len(harness.rows_of(metrics)) == 2, 60, "the evaluation of step 4")
            harness.prl(*sft, "--max-steps", 7, "--ckpt.resume-step", -1)
            status = process.wait(180)
        output = (folder / "follow.log").read_text()
        check(status == 0, output)
        check(re.findall(r"\[step (\d+)\] Evaluated", output) == ["0", "4", "7"], output)
        check([row["step"] for row in harness.rows_of(metrics)] == [0, 4, 7], harness.rows_of(metrics))
        # A run that was resumed: neither the base model nor what came before, and the step itself only if it is asked for.
        out = run(*follow, "--online.max-steps", 7, "--online.resume-step", 4, "--output-dir", folder / "resumed")
        check(re.findall(r"\[step (\d+)\] Evaluated", out) == ["7"], out)
        out = run(*follow, "--online.resume-step", 4, "--no-eval.skip-eval-on-resume", "--online.timeout", 1, "--output-dir", folder / "again", expect=1)
        check(re.findall(r"\[step (\d+)\] Evaluated", out) == ["4"], out)
        out = run(*follow, "--online.max-steps", 7, "--online.resume-step", 5, "--online.every-step", "--eval.interval", 1, "--output-dir", folder / "later")
        check(re.findall(r"\[step (\d+)\] Evaluated", out) == ["6", "7"], out)
        # Each step in its order, once, and its weights only until then. What is not kept is named.
        shutil.copytree(folder / "run/weights", folder / "copies")
        shutil.rmtree(folder / "copies/step_3")
        every = [*common, "--eval.interval", 1, "--output-dir", folder / "every", "--online.broadcasts-dir", folder / "copies", "--online.max-steps", 7,
                 "--online.every-step", "--online.remove-evaluated"]
        out = run(*every)
        check(re.findall(r"\[step (\d+)\] Evaluated", out) == ["0", "1", "2", "4", "5", "6", "7"] and "steps 3 are not evaluated" in out, out)
        check(not list((folder / "copies").iterdir()), "weights of evaluated steps")
        check("Evaluated" not in run(*every), "steps that are in the metrics file were evaluated again")
        # A step that nobody writes is not waited for without an end.
        errors = run(*follow, "--online.resume-step", 7, "--online.timeout", 1, "--output-dir", folder / "late", expect=1)
        check("after step 7" in errors and "online.timeout" in errors, errors)


def tuning(folder, *extra):
    """(command of a fine-tuning run that is evaluated every two steps, what says how it is evaluated, as `prl eval` takes it)."""
    data = folder / "data.jsonl"
    if not data.exists():
        harness.sft_data(data, 64)
    env = ["--env.0.id", "reverse-text", "--env.0.args", json.dumps(harness.ENV_ARGS), "--num-examples", 8,
           "--sampling.temperature", 0, "--sampling.max-completion-tokens", 48]
    evals = [word.replace("--", "--eval.") if str(word).startswith("--") else word for word in env]
    return ["sft", "--model.name", harness.warm_model(), "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 4, "--optim.lr", "1e-3",
            "--eval.interval", 2, *evals, *extra], env


def steps_of(out, role):
    return [row["step"] for row in harness.rows_of(out / "metrics.jsonl") if row["role"] == role]


def replies_of(out):
    """Replies by step and example of all results below an output folder."""
    found = {}
    for path in (out / "evals").rglob("metadata.json"):
        rows = sorted(harness.rows_of(path.parent / "results.jsonl"), key=lambda row: row["example_id"])
        found[json.loads(path.read_text())["ckpt_step"]] = [(row["completion"], row["reward"]) for row in rows]
    return found


def test_a_fine_tuning_run_evaluates_its_steps():
    with harness.workspace("tuning") as folder:
        out, (sft, env) = folder / "out", tuning(folder, "--ckpt.interval", 2)
        run(*sft, "--max-steps", 7, "--output-dir", folder / "dry", "--dry-run")
        written = json.loads((folder / "dry/configs/evals.json").read_text())
        check(written["online"]["broadcasts_dir"] == str(folder / "dry/broadcasts") and written["online"]["max_steps"] == 7, written["online"])
        said = run(*sft, "--max-steps", 7, "--output-dir", out)
        check(re.findall(r"\[step (\d+)\] Evaluated reverse-text", said) == ["0", "2", "4", "6", "7"], said)
        check(steps_of(out, "eval") == [0, 2, 4, 6, 7] and steps_of(out, "sft") == list(range(1, 8)), harness.rows_of(out / "metrics.jsonl"))
        check(not list((out / "broadcasts").iterdir()), "weights that are evaluated are not kept")
        # What the saved weights answer.
        run("eval", "--model.name", harness.warm_model(), "--weights-dir", out / "weights", *env, "--output-dir", folder / "again")
        mine, again = replies_of(out), replies_of(folder / "again")
        check(mine == again and sorted(mine) == [0, 2, 4, 6, 7], "the saved weights answer differently")
        check(len({json.dumps(replies) for replies in mine.values()}) >= 3, "steps answer alike: their weights were not loaded")
        for row in harness.rows_of(out / "metrics.jsonl"):
            if row["role"] == "eval":
                rewards = [reward for _, reward in mine[row["step"]]]
                check(abs(row["eval/reverse-text/avg@1"] - sum(rewards) / len(rewards)) < 1e-6, row)
        # A run that goes on evaluates what is new.
        said = run(*sft, "--max-steps", 9, "--ckpt.resume-step", -1, "--output-dir", out)
        check(re.findall(r"\[step (\d+)\] Evaluated", said) == ["8", "9"], said)
        check(steps_of(out, "eval") == [0, 2, 4, 6, 7, 8, 9], harness.rows_of(out / "metrics.jsonl"))
        said = run(*sft, "--max-steps", 9, "--ckpt.resume-step", -1, "--output-dir", out)
        check("nothing to do" in said, said)


def test_what_ranks_and_adapters_publish_is_what_they_save():
    for name, extra in {"ranks": ["--deployment.num-gpus", 2], "layers": ["--deployment.num-gpus", 2, "--model.reshard-after-forward"],
                        "adapter": ["--model.lora", "--model.lora.alpha", 1024]}.items():
        with harness.workspace(f"tuning-{name}") as folder:
            sft, env = tuning(folder, "--ckpt.interval", 2, *extra)
            run(*sft, "--max-steps", 4, "--output-dir", folder / "out")
            run("eval", "--model.name", harness.warm_model(), "--weights-dir", folder / "out/weights", *env, "--output-dir", folder / "again")
            mine, again = replies_of(folder / "out"), replies_of(folder / "again")
            check(sorted(mine) == sorted(again) == [0, 2, 4], f"{name}: steps {sorted(mine)}, {sorted(again)}")
            # An adapter is published as it is and saved merged, which bfloat16 rounds.
            rounds = name == "adapter" and "parameters in bfloat16" in (folder / "out/logs/latest/evals.log").read_text()
            check(rounds or mine == again, f"{name}: the saved weights answer differently")
            check(len({json.dumps(replies) for replies in mine.values()}) >= 2, f"{name}: steps answer alike: their weights were not loaded")


def pid_of_evals(log):
    """Of the process that was started last."""
    found = re.findall(r"started evals \(pid (\d+)\)", log.read_text()) if log.exists() else []
    return found and (len(found), int(found[-1]))


def test_a_fine_tuning_run_survives_its_evaluations():
    # Steps of some 0.1 s on an idle machine: the run is far from its end when its evaluations have begun.
    with harness.workspace("tuning-killed") as folder:
        out, log = folder / "out", folder / "log"
        sft, _ = tuning(folder, "--data.batch-size", 16, "--eval.interval", 30, "--max-steps", 75, "--output-dir", out)
        with harness.running(*sft, log=log) as process:
            harness.wait_until(lambda: (out / "metrics.jsonl").exists() and steps_of(out, "eval"), 60, "the evaluation of the base model")
            os.kill(pid_of_evals(log)[1], signal.SIGKILL)
            harness.wait_until(lambda: pid_of_evals(log)[0] == 2, 60, "the second start of the evaluations")
            check(process.wait(600) == 0, log.read_text())
        said = log.read_text()
        check("evals was killed by signal 9" in said and "started again" in said, said)
        check(steps_of(out, "eval") == [0, 30, 60, 75], f"{steps_of(out, 'eval')}: each step once")
        check(steps_of(out, "sft") == list(range(1, 76)), "the training went on")
        # One that fails by itself: a cache that holds no reply.
        out = folder / "failing"
        said = run(*tuning(folder, "--max-steps", 3, "--output-dir", out, "--inference.kv.num-blocks", 1)[0])
        check("The run goes on without it" in said and "evals.log" in said and "sft finished after step 3" in said, said)
        check("are not evaluated yet: `prl evals @" in said, said)
        # Its weights wait for whoever evaluates them.
        said = run("evals", "@", out / "configs/evals.json", "--inference.kv.num-blocks", 999)
        check(re.findall(r"\[step (\d+)\] Evaluated", said) == ["0", "2", "3"], said)


def test_an_interrupted_fine_tuning_run_evaluates_the_rest_later():
    with harness.workspace("tuning-cut") as folder:
        out, log = folder / "out", folder / "log"
        sft, _ = tuning(folder, "--ckpt", "--output-dir", out)
        with harness.running(*sft, "--max-steps", 100000, "--eval.interval", 100000, log=log) as process:
            harness.wait_until(lambda: (out / "metrics.jsonl").exists() and steps_of(out, "eval") == [0] and len(steps_of(out, "sft")) > 2, 60, "some steps")
            evals = pid_of_evals(log)[1]
            process.send_signal(signal.SIGINT)
            check(process.wait(180) == 130, f"exit status {process.returncode}: {log.read_text()}")
        check(not os.path.exists(f"/proc/{evals}"), "the evaluations outlived the run")
        last = steps_of(out, "sft")[-1]
        said = run(*sft, "--max-steps", last + 2, "--eval.interval", last + 1, "--ckpt.resume-step", -1)
        check(re.findall(r"\[step (\d+)\] Evaluated", said) == [str(last + 1), str(last + 2)], said)


def test_a_folder_and_its_checkpoints_are_evaluated_in_the_process():
    with harness.workspace("local") as folder:
        model = harness.tiny_model(folder / "model")
        for step in (2, 10, 30):
            harness.prl("init-model", folder / f"weights/step_{step}", "--family", "qwen3", "--vocab-size", 320, "--hidden-size", 64,
                        "--intermediate-size", 128, "--num-layers", 2, "--num-heads", 4, "--num-kv-heads", 2,
                        "--initializer-range", "0.06", "--seed", step)
        common = ["eval", "--model.name", model, "--env.id", "gsm8k-synthetic", "--env.args", json.dumps(SUMS), "--num-examples", 3,
                  "--sampling.max-tokens", 8, "--sampling.extra-body", '{"min_tokens": 8}', "--output-dir", folder / "out"]
        out = run(*common, "--weights-dir", folder / "weights", "--steps", "2,30")
        order = re.findall(r"\[step (\d+)\] Evaluated", out)
        check(order == ["0", "30", "2"], f"evaluated in the order {order}")
        steps = sorted(json.loads(path.read_text())["ckpt_step"] for path in (folder / "out/evals").rglob("metadata.json"))
        check(steps == [0, 2, 30], steps)
        # A server leaves out special tokens inside a reply, which only a model of random weights writes.
        visible = lambda row: re.sub(r"<\|\w+\|>", "", row["completion"][0]["content"])
        replies = {path.parent: [visible(row) for row in sorted(harness.rows_of(path), key=lambda row: row["example_id"])]
                   for path in (folder / "out/evals").rglob("results.jsonl")}
        check(len({tuple(texts) for texts in replies.values()}) == 3, "checkpoints answer alike: their weights were not loaded")
        out = run(*common, "--weights-dir", folder / "weights", "--no-eval-base")
        check(re.findall(r"\[step (\d+)\] Evaluated", out) == ["30", "10", "2"], out)
        errors = run(*common, "--weights-dir", folder / "weights", "--steps", "4", expect=1)
        check("step_4" in errors, errors)
        errors = run(*common, "--sampling.extra-body", '{"guided": 1}', expect=1)
        check("extra_body.guided" in errors, errors)
        # The same folder behind a server: weights are put into it, replies are those of the process.
        port = harness.free_port()
        with harness.running("inference", "--model.name", model, "--server.port", port, log=folder / "inference.log"):
            harness.wait_until(lambda: harness.is_healthy(port), 60, "the server")
            served = [word if word != folder / "out" else folder / "served" for word in common]
            version = lambda: harness.request(port, "GET", "/version")[1]["policy_version"]
            remote = [*served, "--client.base-url", f"http://127.0.0.1:{port}/v1"]
            checkpoint = [*remote, "--weights-dir", folder / "weights", "--steps", "30"]
            out = run(*checkpoint)
            check(version() == 0 and "the first weights are back" in out, f"the server stays on version {version()}: {out}")
            found = {json.loads(path.read_text())["ckpt_step"]: json.loads(path.read_text())["policy_version"]
                     for path in (folder / "served/evals").rglob("metadata.json")}
            check(found == {0: 0, 30: 30}, f"policy versions by step: {found}")
            # An interrupted one puts them back too.
            slow = [word if word != folder / "served" else folder / "cut" for word in checkpoint]
            slow += ["--no-eval-base", "--sampling.max-tokens", 4000, "--sampling.extra-body", '{"ignore_eos": true}', "--max-concurrent", 1]
            with harness.running(*slow, log=folder / "cut.log") as process:
                harness.wait_until(lambda: version() == 30 or process.poll() is not None, 60, "the checkpoint in the server")
                process.send_signal(signal.SIGINT)
                process.wait(180)
            check(version() == 0, f"interrupted, the server stays on version {version()}: {(folder / 'cut.log').read_text()}")
            # Weights that are not the first ones are told, and recorded.
            harness.request(port, "POST", "/update_weights", {"weight_dir": str(folder / "weights/step_10")})
            plain = [word if word != folder / "served" else folder / "plain" for word in remote]
            out = run(*plain)
            check("runs weights of policy version 10, not those it was started with" in out, out)
            recorded = json.loads(only((folder / "plain/evals").rglob("metadata.json")).read_text())["policy_version"]
            check(recorded == 10, f"policy_version {recorded}")
        for path in (folder / "served/evals").rglob("metadata.json"):
            texts = [visible(row) for row in sorted(harness.rows_of(path.parent / "results.jsonl"), key=lambda row: row["example_id"])]
            step = json.loads(path.read_text())["ckpt_step"]
            mine = [value for where, value in replies.items()
                    if json.loads((where / "metadata.json").read_text())["ckpt_step"] == step]
            check(texts in mine, f"step {step}: the server and the process answer differently")


def test_synthetic_data_trains_as_it_is():
    def answer(body):
        if "tools" in body:
            return search(body)
        text = body["messages"][-1]["content"]
        return (400, "no") if text.endswith("Bad?") else solve(body)

    with harness.workspace("synth") as folder, Server(answer) as server:
        model = harness.tiny_model(folder / "model")
        args = json.dumps({**SUMS, "num_train": 6})
        data = folder / "data"
        common = ["synthesize", "--model.name", "m", "--client.base-url", server.url, "--rollouts-per-example", 2,
                  "--output-dir", folder / "out"]
        math = [*common, "--env.id", "gsm8k-synthetic", "--env.args", args, "--reasoning-field", "reasoning", "--save.disk.path", data]
        out = run(*math)
        check("Synthesized 12 rollouts of 6 examples" in out, out)
        out = run(*math)
        check("12 rollouts were there already" in out, out)
        check(len(harness.rows_of(data / "results.jsonl")) == 12, f"{len(harness.rows_of(data / 'results.jsonl'))} rows: a second run doubled them")
        harness.prl(*math, "--seed", 43)
        rows = harness.rows_of(data / "results.jsonl")
        check(len(rows) == 24, f"{len(rows)} rows after a run with another seed")
        check(rows[0]["completion"][0]["reasoning_content"].startswith("I add up to"), rows[0])
        check("rollout_idx" not in rows[0] and "oai_tools" in rows[0] and rows[0]["reward"] == 1.0, rows[0])
        world = json.dumps({"num_pages": 12, "num_train": 4, "num_eval": 4})
        out = run(*common, "--env.id", "wiki-search-synthetic", "--env.args", world)
        tools = only((folder / "out/evals").glob("wiki-search-synthetic--m/*/results.jsonl"))
        row = harness.rows_of(tools)[0]
        check([message["role"] for message in row["completion"]] == ["assistant", "tool"] * 3 + ["assistant"], row["completion"])
        check(row["tool_defs"][0]["name"] == "search_pages" and row["metrics"]["total_tool_calls"] == 3, row)
        for number, file in enumerate((data / "results.jsonl", tools)):
            out = run("sft", "--model.name", model, "--data.name", file, "--data.seq-len", 2048, "--data.batch-size", 1,
                                 "--max-steps", 2, "--output-dir", folder / f"sft{number}")
            check("Step 2" in out, out)


def test_failed_groups_leave_no_rows():
    refused = set()

    def answer(body):
        question = body["messages"][-1]["content"]
        if not refused:
            refused.add(question)
        return (400, "this one never") if question in refused else solve(body)

    with harness.workspace("dropped") as folder, Server(answer) as server:
        command = ["synthesize", "--model.name", "m", "--client.base-url", server.url, "--env.id", "gsm8k-synthetic", "--env.args",
                   json.dumps({**SUMS, "num_train": 6}), "--rollouts-per-example", 3, "--output-dir", folder / "out",
                   "--save.disk.path", folder / "data"]
        out = run(*command, expect=1)
        check("1 of 6 groups of gsm8k-synthetic failed and are missing" in out, out)
        rows = harness.rows_of(folder / "data/results.jsonl")
        check(len(rows) == 15 and not any(row["prompt"][-1]["content"] in refused for row in rows), f"{len(rows)} rows")
        metadata = json.loads((folder / "data/metadata.json").read_text())
        check(metadata["is_complete"] is False and metadata["num_dropped_groups"] == 1 and metadata["num_wanted_examples"] == 6, metadata)
        refused.clear()
        refused.add("nothing")
        before = len(server.requests)
        out = run(*command)
        check(len(server.requests) - before == 3 and len(harness.rows_of(folder / "data/results.jsonl")) == 18, out)
        check(json.loads((folder / "data/metadata.json").read_text())["is_complete"] is True, "complete now")


def test_a_server_that_goes_away_loses_no_groups():
    gone = [True] * 5

    def answer(body):
        return (503, "restarting") if gone and gone.pop() else solve(body)

    with harness.workspace("away") as folder, Server(answer) as server:
        out = run("synthesize", "--model.name", "m", "--client.base-url", server.url, "--env.id", "gsm8k-synthetic", "--env.args",
                  json.dumps({**SUMS, "num_train": 4}), "--max-concurrent", 1, "--retry.wait-min", 0.01, "--retry.wait-max", 0.05,
                  "--output-dir", folder / "out")
        check("Synthesized 4 rollouts of 4 examples" in out, out)


def test_a_folder_makes_data_in_the_process():
    with harness.workspace("local-synth") as folder:
        model = harness.tiny_model(folder / "model")
        out = run("synthesize", "--model.name", model, "--env.id", "wordle", "--env.args",
                             json.dumps({"max_guesses": 2, "num_train": 3}), "--sampling.max-tokens", 8, "--output-dir", folder / "out")
        check("Synthesized 3 rollouts" in out, out)
        rows = harness.rows_of(only((folder / "out").rglob("results.jsonl")))
        check(all(len(row["completion"]) == 3 for row in rows), "two guesses and what the game said between them")


if __name__ == "__main__":
    harness.main(test_two_servers_share_two_environments, test_what_fails_is_tried_again_unless_it_cannot_succeed,
                 test_an_interrupted_evaluation_goes_on, test_a_run_is_followed_while_it_writes_its_steps,
                 test_a_fine_tuning_run_evaluates_its_steps, test_what_ranks_and_adapters_publish_is_what_they_save,
                 test_a_fine_tuning_run_survives_its_evaluations,
                 test_an_interrupted_fine_tuning_run_evaluates_the_rest_later,
                 test_a_folder_and_its_checkpoints_are_evaluated_in_the_process,
                 test_synthetic_data_trains_as_it_is, test_failed_groups_leave_no_rows,
                 test_a_server_that_goes_away_loses_no_groups, test_a_folder_makes_data_in_the_process)
