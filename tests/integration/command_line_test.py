#!/usr/bin/env python3
"""The commands as people type them: names and aliases, sources of configuration, --dry-run, and what is not built."""
import json
import pathlib
import subprocess

import harness
from harness import ROOT, check, prl

COMMANDS = ("rl", "sft", "inference", "orchestrator", "trainer", "eval", "synthesize", "init-model", "make-data", "convert", "chat",
            "results", "bench", "doctor", "evals", "env-server")


def resolved(folder, role):
    return json.loads((folder / f"configs/{role}.json").read_text())


def test_help_and_version():
    stdout, _ = prl("--help")
    for command in COMMANDS:
        check(command in stdout, f"prl --help does not list {command}")
        text, _ = prl(command, "--help")
        check(text.startswith(f"usage: prl {command}") and len(text.splitlines()) < 60, f"{command} --help: {text[:200]}")
        check(prl("help", command)[0] == text, f"prl help {command} differs from prl {command} --help")
        check(prl(command, "--version")[0].startswith("prl "), f"{command} --version")
    check(prl("--version")[0].startswith("prl "), "no version")
    with open("/dev/full", "w") as full:
        done = subprocess.run([harness.PRL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=20)
    check(done.returncode == 1 and "No space left on device" in done.stderr, f"help that is not written: {done.returncode} {done.stderr}")
    subjects = {line["subject"] for line in json.loads(prl("doctor", "--json")[0])}
    check({"cpu", "memory", "gpu", "open files", "disk"} <= subjects, f"doctor speaks of {subjects}")


def test_links_named_like_commands():
    with harness.workspace("links") as folder:
        model = harness.warm_model()
        for command in ("rl", "sft", "trainer", "orchestrator", "inference", "eval"):
            (folder / command).symlink_to(pathlib.Path(harness.PRL).resolve())
            done = subprocess.run([folder / command, "--help"], capture_output=True, text=True, timeout=20)
            check(done.returncode == 0 and f"prl {command} " in done.stdout.splitlines()[0], f"{command}: {done.stdout[:100]}{done.stderr}")
        flags = ["@", "examples/reverse_text/rl.toml", "--model.name", model, "--dry-run"]
        done = subprocess.run([folder / "rl", *flags, "--output-dir", folder / "a"], capture_output=True, text=True, cwd=ROOT, timeout=20)
        check(done.returncode == 0, f"rl as a link: {done.stderr}")
        prl("rl", *flags, "--output-dir", folder / "b", cwd=ROOT)
        prl("uv", "run", "rl", *flags, "--output-dir", folder / "c", cwd=ROOT)
        for role in ("rl", "trainer", "orchestrator", "inference"):
            texts = {json.dumps(resolved(folder / name, role)).replace(str(folder / name), "OUT") for name in "abc"}
            check(len(texts) == 1, f"{role}.json differs between the three ways to start")


def test_sources_in_their_order():
    with harness.workspace("sources") as folder:
        model = str(harness.warm_model())
        first, second, role = folder / "first.toml", folder / "second.toml", folder / "trainer.toml"
        first.write_text(f'max_steps = 11\nseed = 1\n[model]\nname = "{model}"\n[inference]\n')
        second.write_text("max_steps = 12\n")
        role.write_text("[optim]\nlr = 0.25\n")
        environment = {"PRIME_MAX_STEPS": "10", "PRIME_SEQ_LEN": "512"}

        def dry(*flags):
            prl("rl", *flags, "--dry-run", "--output-dir", folder / "out", env=environment)
            return resolved(folder / "out", "trainer")

        got = dry("@", first)
        check(got["max_steps"] == 11 and got["model"]["seq_len"] == 512 and got["seed"] == 1, f"{got['max_steps']} {got['model']}")
        check(dry("@", first, "@", second)["max_steps"] == 12, "the later file does not win")
        got = dry("@", first, "@", second, "--max-steps", 13, "--trainer", "@", role, "--trainer.optim.weight_decay", 0.5)
        check(got["max_steps"] == 13 and got["optim"]["lr"] == 0.25 and got["optim"]["weight_decay"] == 0.5, f"{got['optim']}")
        # What was written is a configuration that resolves to itself.
        before = resolved(folder / "out", "rl")
        prl("rl", "@", folder / "out/configs/rl.json", "--dry-run")
        check(resolved(folder / "out", "rl") == before, "the resolved file does not resolve to itself")
        before = resolved(folder / "out", "inference")
        prl("inference", "@", folder / "out/configs/inference.toml", "--dry-run")
        check(resolved(folder / "out", "inference") == before, "inference.toml does not resolve to inference.json")


def test_a_dry_run_starts_nothing():
    with harness.workspace("dry") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model())
        _, stderr = prl("rl", "@", config, "--output-dir", folder / "out", "--dry-run")
        check("remove --dry-run" in stderr, f"{stderr}")
        check(sorted(path.name for path in (folder / "out").iterdir()) == ["configs"], "a dry run wrote more than configs")
        prl("sft", "--model.name", harness.warm_model(), "--data.name", harness.sft_data(folder / "d.jsonl", 4), "--output-dir",
            folder / "sft", "--dry-run")
        check((folder / "sft/configs/sft.toml").exists(), "no resolved sft.toml")


def test_a_dry_run_refuses_what_a_start_would_refuse():
    model = str(harness.warm_model())
    with harness.workspace("dry_checks") as folder:
        rl = ["rl", "--inference", "--output-dir", folder / "out", "--dry-run", "--model.name"]
        for flags, word in (([*rl, folder / "nowhere"], "nowhere"),
                            ([*rl, model, "--orchestrator.train.env.0.args.no-such-argument", 1], "no_such_argument"),
                            ([*rl, model, "--orchestrator.train.env.0.data", folder / "gone.jsonl"], "gone.jsonl")):
            _, stderr = prl(*flags, expect=1, cwd=folder)
            check(word in stderr and "remove --dry-run" not in stderr, f"{flags}: {stderr}")
        prl(*rl, model, cwd=folder)


def test_what_is_not_built_says_so():
    model = str(harness.warm_model())
    cases = {
        ("rl", "--model.name", model, "--inference", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2, "--trainer.model.cp", 2,
         "--trainer.model.cp-style", "ring"): "model.cp_style",
        ("inference", "--model.name", model, "--model.quantization", "awq"): "model.quantization",
    }
    with harness.workspace("unbuilt") as folder:
        for arguments, word in cases.items():
            _, stderr = prl(*arguments, expect=1, cwd=folder, timeout=60)
            check(word in stderr and ("not_implemented" in stderr or "not built" in stderr), f"{' '.join(map(str, arguments))}: {stderr}")
            check("terminate called" not in stderr and len(stderr.splitlines()) < 20, f"a dump: {stderr[-2000:]}")


def test_files_that_are_there_are_not_overwritten():
    with harness.workspace("overwrite") as folder:
        (folder / "chart.svg").write_text("mine")
        (folder / "report.html").write_text("mine")
        (folder / "data.jsonl").write_text("mine")
        (folder / "k8s").mkdir()
        (folder / "k8s/manifests.yaml").write_text("mine")
        make = ("make-data", folder / "data.jsonl", "--env.id", "reverse-text", "--num-examples", 2)
        render = ("k8s", "render", "--example", "reverse-text", "--image.repository", "registry.example/prl", "--output-dir", folder / "k8s")
        (folder / "bench.json").write_text("mine")
        for command in (make, render, ("bench", "decode", "--output-json", folder / "bench.json"), ("plot", folder, "--out", folder / "chart.svg"), ("report", folder, "--out", folder / "report.html")):
            _, stderr = prl(*command, expect=1)
            check("exists already" in stderr and "--overwrite" in stderr, f"{command[0]}: {stderr}")
        for name in ("chart.svg", "report.html", "data.jsonl", "k8s/manifests.yaml", "bench.json"):
            check((folder / name).read_text() == "mine", f"{name} was written to")
        for command, name in ((make, "data.jsonl"), (render, "k8s/manifests.yaml")):
            prl(*command, "--overwrite")
            check((folder / name).read_text() != "mine", f"{name} was not written")


def test_commands_of_other_programs_are_answered():
    for line, word in (("torchrun --nproc-per-node 8 src/prime_rl/trainer/sft/train.py @ sft.toml", "prl launch --nproc-per-node 8 sft"), ("vllm serve x", "prl inference"),
                       ("uv sync", "nothing here needs that"), ("rll @ x.toml", "did you mean"), ("@ x.toml", "prl rl")):
        _, stderr = prl(*line.split(), expect=1)
        check(word in stderr, f"prl {line}: {stderr}")


harness.main(test_help_and_version, test_links_named_like_commands, test_sources_in_their_order, test_a_dry_run_starts_nothing,
             test_a_dry_run_refuses_what_a_start_would_refuse,
             test_what_is_not_built_says_so, test_files_that_are_there_are_not_overwritten, test_commands_of_other_programs_are_answered)
