#!/usr/bin/env python3
"""Every command line of the documents about fine-tuning, evaluation and synthetic data (tests/seeds/commands.txt), run as it is written.

Only names are put in: of models, data sets and servers, for tiny ones on this machine, and what "..." stands for. Limits make each
line end in seconds. Lines that cannot run here must say why (EXPECTED below, and docs/evaluation.md).
"""
import os
import pathlib
import re
import shlex
import shutil
import time

import harness
from harness import check, prl

COMMANDS = pathlib.Path(__file__).resolve().parents[1] / "seeds/commands.txt"
# What a line that cannot run must end with: (pattern of the line, words of the error).
EXPECTED = [
    (r"^uv run torchrun", "torchrun is not needed"),
    (r"^prime eval", "is a command of another program"),
]
# The variable with which lines that log to Weights & Biases run without an account, as its client's users do.
OFFLINE = {"WANDB_MODE": "disabled"}
STEPS = (10, 20, 30, 40, 50, 100)


def commands(kind):
    lines = [line for line in COMMANDS.read_text().splitlines() if line and not line.startswith("#")]
    return [line for line in lines if kind in line.split("...")[0]]


class Place:
    """A folder that looks like the one the documents work in: its configs, and outputs/weights of an earlier run."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("configs", "examples"):
            os.symlink(harness.ROOT / name, folder / name)
        self.model = harness.warm_model()
        for step in STEPS:
            shutil.copytree(self.model, folder / f"outputs/weights/step_{step}")
        self.data = harness.sft_data(folder / "data.jsonl", 64)
        self.data_sets = harness.hub_data_sets(folder / "hub")

    def run(self, line, replacements, limits):
        for pattern, words in EXPECTED:
            if re.search(pattern, line):
                _, stderr = prl(*shlex.split(line), cwd=self.folder, expect=None)
                check(words in stderr, f"{line}: {stderr}")
                return "refused: " + words
        for name, value in replacements.items():
            line = line.replace(name, str(value))
        arguments = shlex.split(line)
        if "--help" in arguments:
            stdout, _ = prl(*arguments, cwd=self.folder)
            check("--model.name" in stdout, f"{line}: {stdout[:500]}")
            return "help"
        # Flags of the line win: a limit is given only for what it leaves open.
        for flag, value in limits.items():
            if flag not in arguments:
                arguments += [flag, *([value] if value != "" else [])]
        stdout, stderr = prl(*arguments, cwd=self.folder, env={**OFFLINE, **self.data_sets, "OPENAI_API_KEY": "unused"})
        return stdout + stderr


def told(line, began):
    print(f"      {time.monotonic() - began:5.1f} s  {line}", flush=True)


def each_line(place, line, names, limits, look):
    began = time.monotonic()
    out = place.run(line, names, limits)
    if not out.startswith(("refused", "help")):
        look(line, out)
    told(line, began)


def each(kind, place, replacements, limits, look):
    for number, line in enumerate(commands(kind)):
        each_line(place, line, replacements, {flag: value(number) if callable(value) else value for flag, value in limits.items()}, look)


def test_fine_tuning():
    with harness.workspace("seed-sft") as folder:
        place = Place(folder)
        own = f"--model.name {place.model} --data.name {place.data} --data.seq-len 256 --data.batch-size 4"
        # The first of the two lines about resuming saves what the second goes on from: they share a folder.
        folders = {}

        def output(number):
            return folders.setdefault(number, f"outputs/sft{1 if number == 2 else number}")

        def look(line, out):
            if "--bench" in line:
                check("Throughput" in out or "tokens/s" in out, out[-1500:])
            else:
                last = 40 if "resume-step" in line else 20 if "--max-steps 20" in line else 2
                check(f"Step {last}" in out, f"{line}: {out[-1500:]}")

        limits = {"--max-steps": 2, "--output-dir": output}
        # Where a line has batch and sequence lengths of its own, they are not put in a second time.
        replacements = {"... --data.seq-len": f"--model.name {place.model} --data.name {place.data} --data.seq-len",
                        # A million tokens are no small limit: the last of two flags wins.
                        "--data.micro-batch-size 2 --bench": "--data.micro-batch-size 2 --bench --data.seq-len 256 --data.batch-size 8",
                        "... --data.type fake": f"--model.name {place.model} --data.seq-len 256 --data.batch-size 4 --data.type fake",
                        "...": own,
                        "examples/reverse_text/sft.toml": f"examples/reverse_text/sft.toml --model.name {place.model} --data.name {place.data} "
                                                          "--data.seq-len 256 --data.batch-size 4 --max-steps 2"}
        each("sft", place, replacements, limits, look)


def served(place, name, *flags):
    port = harness.free_port()
    return port, harness.running("inference", "--model.name", place.model, "--model.served-name", name, "--server.port", port, *flags,
                                 cwd=place.folder, log=place.folder / f"{name}.log")


def wait_for(port, process):
    harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 60, "the server")
    check(process.poll() is None, "the server ended")


EVAL_LIMITS = {"--num-examples": 2, "--rollouts-per-example": 2, "--sampling.max-tokens": 12, "--log.level": "info"}


def test_evaluation():
    with harness.workspace("seed-eval") as folder:
        place = Place(folder)
        port, server = served(place, "gpt-4.1-mini")
        local_port, local = served(place, str(place.model))
        with server as first, local as second:
            wait_for(port, first)
            wait_for(local_port, second)

            def look(line, out):
                wanted = len(STEPS) + 1 if "--weights-dir" in line and "--steps" not in line else len(re.search(r"--steps (\S+)", line)[1].split(",")) if "--steps" in line else 1
                wanted *= 2 if "math500" in line or "multi_env" in line else 1
                count = len(re.findall(r"Evaluated ", out))
                check(count == wanted, f"{line}: {count} evaluations, wanted {wanted}: {out[-1500:]}")

            api, own = f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{local_port}/v1"
            # my-env stands for any environment.
            names = {"https://api.openai.com/v1 --client.api-key-var OPENAI_API_KEY --model.name <model-name>": f"{api} --client.api-key-var OPENAI_API_KEY --model.name gpt-4.1-mini",
                     "http://localhost:8000/v1 --weights": f"{own} --weights", "http://localhost:8000/v1": own, "http://localhost:8007/v1": api,
                     "<model-name>": place.model, "my-env": "reverse-text"}
            for line in commands("eval"):
                # Lines without an address ask the OpenAI API for its model, or a folder in the process.
                limits = dict(EVAL_LIMITS)
                if "--client.base-url" not in line and "<model-name>" not in line and "--help" not in line:
                    limits["--client.base-url"] = api
                if "local_model.toml --client" in line and "--model.name" not in line:
                    limits["--model.name"] = place.model  # the file names a folder of the documents' own run
                each_line(place, line, names, limits, look)
            listed, _ = prl("eval", "list", cwd=folder)
            check("reverse-text" in listed and "gsm8k" in listed, listed)


def test_synthetic_data():
    with harness.workspace("seed-synth") as folder:
        place = Place(folder)
        port, server = served(place, "gpt-4.1-mini", "--model.tool-call-parser", "hermes")
        with server as process:
            wait_for(port, process)

            def look(line, out):
                wanted = 2 if "multi_env" in line else 1
                check(len(re.findall(r"Synthesized ", out)) == wanted, f"{line}: {out[-1500:]}")

            limits = {"--client.base-url": f"http://127.0.0.1:{port}/v1", "--num-examples": 2, "--rollouts-per-example": 2, "--sampling.max-tokens": 12}
            for line in commands("synthesize"):
                each_line(place, line, {}, limits, look)
        rows = sorted(folder.glob("outputs/evals/*/*/results.jsonl"))
        check(len(rows) >= 6, f"{rows}")
        single = next(path for path in rows if path.parent.parent.name.startswith("gsm8k"))
        stdout, stderr = prl("sft", "--model.name", place.model, "--data.name", single, "--data.seq-len", 1024, "--data.batch-size", 1,
                             "--max-steps", 1, "--output-dir", folder / "trained")
        check("Step 1" in stdout + stderr, "what was synthesized does not train")


harness.main(test_fine_tuning, test_evaluation, test_synthetic_data)
