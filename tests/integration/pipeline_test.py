#!/usr/bin/env python3
"""From random weights to an evaluated policy: init-model, make-data, sft, rl, eval, and where each leaves its files."""
import json
import pathlib

import harness
from harness import check, prl

ENV = ["--env.id", "reverse-text", "--env.args", json.dumps(harness.ENV_ARGS)]
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def evaluation(out):
    """The only evaluation below a folder: (metadata, results)."""
    found = list(out.glob("evals/*/*/metadata.json"))
    check(len(found) == 1, f"{len(found)} evaluations below {out}")
    return json.loads(found[0].read_text()), harness.rows_of(found[0].parent / "results.jsonl")


def test_the_chain_from_random_weights_to_an_evaluated_policy():
    with harness.workspace("chain") as folder:
        base = harness.tiny_model(folder / "base")
        check(MODEL_FILES <= names(base), f"{names(base)}")
        data = harness.sft_data(folder / "sft.jsonl", 512)
        first = harness.rows_of(data)[0]["messages"]
        check([message["role"] for message in first] == ["system", "user", "assistant"], f"{first}")
        check(first[1]["content"][::-1] in first[2]["content"], f"the answer is not the reversed text: {first}")

        sft = folder / "sft"
        prl("sft", "--model.name", base, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 60,
            "--optim.lr", "5e-3", "--ckpt", "--ckpt.interval", 30, "--output-dir", sft)
        check(names(sft / "weights") == {"step_30", "step_60"}, f"{names(sft / 'weights')}")
        check(MODEL_FILES <= names(sft / "weights/step_60"), f"{names(sft / 'weights/step_60')}")
        losses = [harness.metrics(sft)[step]["loss/mean"] for step in range(1, 61)]
        check(losses[-1] < losses[0] / 4, f"the loss went from {losses[0]} to {losses[-1]}")

        run = folder / "rl"
        config = harness.rl_config(folder / "rl.toml", sft / "weights/step_60", max_steps=6)
        prl("rl", "@", config, "--output-dir", run, "--ckpt", "--ckpt.interval", 2, "--ckpt.keep-last", 2, "--orchestrator.eval.interval", 3,
            "--orchestrator.eval.num-examples", 8, "--orchestrator.eval.env",
            json.dumps([{"id": "reverse-text", "args": harness.ENV_ARGS}]))
        check(names(run) == {".lock", "checkpoints", "configs", "logs", "metrics.jsonl", "rollouts", "run.json", "spans", "weights"}, f"{names(run)}")
        check(names(run / "weights") == {"step_4", "step_6"}, f"keep_last 2: {names(run / 'weights')}")
        check(names(run / "checkpoints") == {"step_4", "step_6"}, f"keep_last 2: {names(run / 'checkpoints')}")
        check(names(run / "checkpoints/step_6") == {"trainer", "orchestrator"}, f"{names(run / 'checkpoints/step_6')}")
        check({"rl.log", "trainer.log", "orchestrator.log", "inference.log"} <= names(run / "logs/latest"), f"{names(run / 'logs/latest')}")
        check((run / "logs/latest").readlink() == pathlib.Path("attempt_1") and names(run / "logs") >= {"attempt_1", "latest", "rl.log", "trainer.log"}, f"{names(run / 'logs')}")
        for step in range(1, 7):
            rollouts = harness.rows_of(run / f"rollouts/step_{step}/train_rollouts.jsonl")
            check(len(rollouts) == 16, f"step {step}: {len(rollouts)} rollouts")
            check(all("reward" in rollout and "advantage" in rollout for rollout in rollouts), f"{rollouts[0].keys()}")
        metrics = harness.metrics(run)
        newest = harness.check_rows(run)
        check(newest == {"trainer": 6, "orchestrator": 6, "online_eval": 6}, f"{newest}")
        for key in ("reward/all/mean", "loss/mean", "mismatch_kl/all/mean", "entropy/all/mean", "optim/grad_norm", "optim/lr",
                    "perf/throughput", "perf/mfu", "perf/peak_memory", "time/step", "progress/total_tokens"):
            check(all(key in metrics[step] for step in range(1, 7)), f"metrics.jsonl has no {key} for every step")

        def evaluate(name, *flags):
            prl("eval", "--model.name", sft / "weights/step_60", *ENV, "--num-examples", 10, "--group-size", 2,
                "--sampling.max-tokens", 48, "--output-dir", folder / name, *flags)
            return folder / name

        metadata, results = evaluation(evaluate("eval"))
        check(len(results) == 20 and metadata["num_examples"] == 10 and metadata["rollouts_per_example"] == 2, f"{len(results)} {metadata}")
        mean = sum(result["reward"] for result in results) / len(results)
        check(abs(mean - metadata["avg_reward"]) < 1e-6, f"{mean} against {metadata['avg_reward']}")
        check(metadata["avg_reward"] > 0 and metadata["avg_error"] == 0, f"{metadata}")
        again, _ = evaluation(evaluate("again"))
        check(again["avg_reward"] == metadata["avg_reward"], "the same evaluation gave another reward")

        steps = evaluate("steps", "--weights-dir", run / "weights", "--steps", "4,6", "--no-eval-base")
        found = sorted(json.loads(path.read_text())["ckpt_step"] for path in steps.glob("evals/*/*/metadata.json"))
        check(found == [4, 6], f"evaluated steps {found}")


def test_checkpoints_in_a_folder_of_their_own():
    with harness.workspace("elsewhere") as folder:
        model = harness.warm_model()
        elsewhere = folder / "elsewhere"
        for deployment in ([], ["--deployment.type", "single_node", "--inference.server.port", harness.free_port()]):
            out = folder / f"run{len(deployment)}"
            config = harness.rl_config(folder / "rl.toml", model, max_steps=2, max_async_level=0)
            keep = ["--ckpt.output-dir", elsewhere / out.name, *deployment]
            prl("rl", "@", config, "--output-dir", out, *keep)
            check(names(elsewhere / out.name / "checkpoints/step_2") == {"trainer", "orchestrator"}, "the roles' parts lie apart")
            check(names(elsewhere / out.name) == {"checkpoints", "weights"}, f"{names(elsewhere / out.name)}")
            check(not {"checkpoints", "weights"} & names(out), f"checkpoints in the run's folder: {names(out)}")
            _, stderr = prl("rl", "@", config, "--output-dir", out, *keep, "--max-steps", 3, expect=1)
            check("--ckpt.resume-step -1" in stderr, f"a fresh run over checkpoints: {stderr[-1000:]}")
            prl("rl", "@", config, "--output-dir", out, *keep, "--max-steps", 3, "--ckpt.resume-step", -1)
            check("resumed from" in (out / "logs/latest/trainer.log").read_text(), "it did not resume")
            check((out / "logs/latest").readlink() == pathlib.Path("attempt_2"), "a resumed run has no attempt of its own")
            check("resumed from" not in (out / "logs/attempt_1/trainer.log").read_text(), "attempts are mixed")
            check((elsewhere / out.name / "weights/step_3/model.safetensors").exists(), "no weights of step 3")


def test_the_trainer_alone_on_random_data():
    with harness.workspace("trainer") as folder:
        stdout, stderr = prl("trainer", "--model.name", harness.warm_model(), "--model.seq-len", 128, "--data.fake", "--max-steps", 3,
                             "--output-dir", folder / "out")
        check(set(harness.metrics(folder / "out")) == {1, 2, 3}, f"{stderr[-1000:]}")
        stdout, _ = prl("trainer", "--model.name", harness.warm_model(), "--model.seq-len", 128, "--data.fake", "--bench",
                        "--output-dir", folder / "bench")
        check("MFU" in stdout or "mfu" in stdout.lower(), f"no table: {stdout}")


def test_a_fresh_run_leaves_another_runs_files_alone():
    with harness.workspace("again") as folder:
        model, data = harness.warm_model(), harness.sft_data(folder / "data.jsonl", 32)
        commands = {
            "sft": ["sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 4, "--ckpt"],
            "trainer": ["trainer", "--model.name", model, "--model.seq-len", 128, "--data.fake", "--ckpt"],
            "rl": ["rl", "@", harness.rl_config(folder / "rl.toml", model), "--ckpt"],
        }
        for name, command in commands.items():
            out = folder / name
            prl(*command, "--max-steps", 2, "--output-dir", out)
            check((out / f"configs/{name}.json").exists() and (out / f"logs/latest/{name}.log").stat().st_size > 0, f"{name}: {names(out)}")
            before = harness.digest(out, "[!.]*")
            _, stderr = prl(*command, "--max-steps", 2, "--output-dir", out, expect=1)
            check("of another run" in stderr and "--ckpt.resume-step -1" in stderr, f"{name}: {stderr}")
            check(harness.digest(out, "[!.]*") == before, f"{name} changed the folder that it refused")
            if name == "sft":
                prl(*command, "--max-steps", 2, "--output-dir", out, "--clean-output-dir")
                check(set(harness.metrics(out)) == {1, 2} and len((out / "metrics.jsonl").read_text().splitlines()) == 2, "the folder was not emptied")
            prl(*command, "--max-steps", 3, "--output-dir", out, "--ckpt.resume-step", -1)
            check((out / "weights/step_3").exists(), f"{name} did not go on")
        # Weights alone are another run's too.
        out = folder / "weights-only"
        prl(*commands["sft"], "--max-steps", 1, "--output-dir", out, "--ckpt.weights-only")
        _, stderr = prl(*commands["sft"], "--max-steps", 1, "--output-dir", out, "--ckpt.weights-only", expect=1)
        check("holds weights, metrics.jsonl of another run" in stderr, f"{stderr}")


def tree(folder):
    """Contents of the files below a folder by name, locks left out: they are empty of records."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}


def test_a_start_that_fails_or_is_refused_changes_no_byte():
    with harness.workspace("untouched") as folder:
        model, data = harness.warm_model(), harness.sft_data(folder / "data.jsonl", 32)
        config, out = harness.rl_config(folder / "rl.toml", model, max_steps=2), folder / "out"
        sft = ["sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 4, "--max-steps", 1]
        prl("rl", "@", config, "--output-dir", out)
        before = tree(out)
        check(harness.check_rows(out) == {"trainer": 2, "orchestrator": 2}, "rows")
        no_model = harness.rl_config(folder / "no-model.toml", folder / "nothing")
        bad_env = folder / "bad-env.toml"
        bad_env.write_text(config.read_text().replace('mode = "tiny"', 'mode = "giant"'))
        for start in (["rl", "@", config], ["rl", "@", no_model], ["rl", "@", no_model, "--clean-output-dir"],
                      ["rl", "@", bad_env, "--clean-output-dir"], sft, ["rl", "@", config, "--ckpt", "--ckpt.resume-step", 2],
                      ["sft", *sft[1:], "--data.name", folder / "no-data.jsonl", "--clean-output-dir"],
                      ["rl", "@", config, "--ckpt", "--ckpt.resume-step", -1, "--clean-output-dir"]):
            _, stderr = prl(*start, "--output-dir", out, expect=1)
            check(tree(out) == before, f"{start} changed the folder: {stderr[-500:]}")
        prl("eval", "--model.name", model, *ENV, "--num-examples", 1, "--sampling.max-tokens", 4, "--output-dir", folder / "eval")
        before = tree(folder / "eval")
        prl("rl", "@", config, "--output-dir", folder / "eval", expect=1)
        check(tree(folder / "eval") == before, "rl changed an evaluation's folder")


def test_files_of_the_user_stay():
    with harness.workspace("own-files") as folder:
        config, home = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1), folder / "home"
        own = ["logs/notes.txt", "rollouts/kept/a.jsonl", "broadcasts/radio/b.txt", "notes.txt", "checkpoints/readme", "recovery/readme"]
        for name in own:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(name)
        for flags in ([], ["--clean-output-dir"], ["--bench"], ["--clean-output-dir"]):
            prl("rl", "@", config, "--output-dir", ".", *flags, cwd=home, expect=1 if flags == ["--bench"] else 0)
            check(all((home / name).read_text() == name for name in own), f"{flags}: {sorted(map(str, home.rglob('*')))}")
        configs = folder / "second/configs"
        configs.mkdir(parents=True)
        (configs / "rl.toml").write_bytes(config.read_bytes())
        for flags in ([], ["--dry-run"], ["--bench"], ["--clean-output-dir"]):
            _, stderr = prl("rl", "@", "configs/rl.toml", "--output-dir", ".", *flags, cwd=configs.parent, expect=1)
            check("configs/rl.toml was not made by a run" in stderr, f"{flags}: {stderr[-500:]}")
            check((configs / "rl.toml").read_bytes() == config.read_bytes() and tree(configs).keys() == {"rl.toml"}, f"{flags}: {tree(configs).keys()}")
        bench = folder / "bench"
        for _ in range(2):
            _, stderr = prl("rl", "@", config, "--bench", "--output-dir", bench, "--orchestrator.bench.output-json", folder / "sampler.json",
                            "--bench.overwrite")
            table = json.loads((folder / "sampler.json").read_text())
            check(len(table["steps"]) == 3 and table["overall"]["throughput"]["mean"] > 0, f"{table}")
            check("Step 4/4" in stderr and "Step 4/1" not in stderr, f"{stderr[-2000:]}")


def test_an_older_step_leaves_the_branch_behind():
    with harness.workspace("branch") as folder:
        out = folder / "out"
        start = ["rl", "@", harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=4), "--output-dir", out,
                 "--ckpt", "--ckpt.interval", 1]
        prl(*start)
        last = harness.digest(out / "weights/step_4", "*.safetensors")
        _, stderr = prl(*start, "--max-steps", 3, "--ckpt.resume-step", -1, expect=1)
        check("is 3" in stderr and "step 4" in stderr, stderr)
        _, stderr = prl(*start, "--ckpt.resume-step", -1)
        check("nothing to do" in stderr, stderr)
        _, stderr = prl(*start, "--ckpt.resume-step", 9, expect=1)
        check("1, 2, 3, 4" in stderr, stderr)
        _, stderr = prl(*start, "--ckpt.resume-step", 2, "--max-steps", 3)
        check("was moved to" in stderr and "checkpoints 3 and 4" in stderr, stderr)
        check(names(out / "abandoned_after_step_2/checkpoints") == {"step_3", "step_4"}, f"{names(out)}")
        check(names(out / "checkpoints") == {"step_1", "step_2", "step_3"}, f"{names(out / 'checkpoints')}")
        check(set(harness.check_rows(out).values()) == {3}, "rows of the branch that was left")
        prl(*start, "--ckpt.resume-step", -1)
        check(harness.digest(out / "weights/step_4", "*.safetensors") == last, "another policy than without the detour")
        check(set(harness.check_rows(out).values()) == {4}, "rows")


def test_the_chat_template_of_a_run_goes_with_its_weights():
    with harness.workspace("template") as folder:
        model, data = harness.warm_model(), harness.sft_data(folder / "data.jsonl", 32)
        template = folder / "other.jinja"
        template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}")
        prl("sft", "--model.name", model, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 4, "--ckpt", "--max-steps", 1,
            "--tokenizer.chat-template", template, "--output-dir", folder / "sft")
        # The model was warmed up with another template: its rewards may all be equal.
        prl("rl", "@", harness.rl_config(folder / "rl.toml", model), "--ckpt", "--max-steps", 1, "--tokenizer.chat-template", template,
            "--orchestrator.train.filter-zero-advantages", "false", "--output-dir", folder / "rl")
        for run in ("sft", "rl"):
            saved = folder / run / "weights/step_1/chat_template.jinja"
            check(saved.exists() and saved.read_text() == template.read_text(), f"{run}: {names(saved.parent)}")


harness.main(test_the_chain_from_random_weights_to_an_evaluated_policy, test_checkpoints_in_a_folder_of_their_own,
             test_the_trainer_alone_on_random_data, test_a_fresh_run_leaves_another_runs_files_alone,
             test_a_start_that_fails_or_is_refused_changes_no_byte, test_files_of_the_user_stay, test_an_older_step_leaves_the_branch_behind,
             test_the_chat_template_of_a_run_goes_with_its_weights)
