#!/usr/bin/env python3
"""The examples as they are shipped: every file is accepted, says first what it needs, and every command in a README runs."""
import json
import os
import pathlib
import re
import shlex

import harness
import images_test
from harness import check, prl

EXAMPLES = harness.ROOT / "examples"
# What makes a run of a shipped file small; everything else is as written.
SMALL = {
    "rl": ["--max-steps", 1, "--orchestrator.batch-size", 4, "--orchestrator.group-size", 2, "--inference.max-num-seqs", 8,
           "--orchestrator.train.filter-zero-advantages", "false", "--orchestrator.buffer.online-difficulty-filtering", "false",
           "--orchestrator.train.sampling.max-completion-tokens", 4],
    "sft": ["--max-steps", 1, "--data.batch-size", 1],
    "eval": ["--num-examples", 2, "--group-size", 1, "--sampling.max-tokens", 4],
    "make-data": ["--num-examples", 8],
}


def commands(readme):
    """The lines of a README's code blocks that call prl, as words without the program."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and pathlib.Path(words[0]).name == "prl":
                found.append(words[1:])
    return found


def prepare(place):
    """A folder in which the commands can be typed: the examples, small models under the names that are used, and data."""
    os.symlink(EXAMPLES, place / "examples")
    model = harness.tiny_model(place / "FOLDER", "--max-position-embeddings", 8192)
    (place / "models").mkdir()
    (place / "outputs/demo/sft/weights").mkdir(parents=True)  # of make demo
    os.symlink(model, place / "outputs/demo/sft/weights/step_240")
    os.symlink(model, place / "models/SmolLM2-135M-Instruct")
    os.symlink(model, place / "TEACHER")
    (place / "images").mkdir()
    os.symlink(images_test.model_for_images(place / "images"), place / "VLM_FOLDER")
    problems = [{"question": f"What is {n} + {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"} for n in range(1, 9)]
    for name in ("train.jsonl", "test.jsonl"):
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in problems))
    (place / "pages").mkdir()
    (place / "pages/town.md").write_text("# Town\n\nThe town has a river.\n")
    (place / "questions.jsonl").write_text(json.dumps({"question": "What has the town?", "answer": "a river"}) + "\n")
    harness.sft_data(place / "texts.jsonl", 16)
    return harness.hub_data_sets(place / "hub")


def test_every_file_is_accepted_as_it_is():
    with harness.workspace("examples") as place:
        variables = prepare(place)
        for path in sorted(EXAMPLES.rglob("*.toml")):
            first = path.read_text().splitlines()[0]
            check(first.startswith("# Needs "), f"{path}: the first line must say what the example needs: {first}")
            command = "eval" if path.name == "eval.toml" else "sft" if path.name == "sft.toml" else "rl"
            prl(command, "@", path, "--model.name", "FOLDER", "--output-dir", "out", "--dry-run", cwd=place, env=variables)


def test_every_command_of_a_readme_runs():
    readmes = sorted(EXAMPLES.glob("*/README.md"))
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    check({path.parent.name for path in readmes} == folders, f"an example without a README: {folders}")
    with harness.workspace("examples") as place:
        variables = prepare(place)
        for readme in readmes:
            found = commands(readme)
            check(found, f"{readme} shows no command")
            port = harness.free_port()
            with harness.running("inference", "--model.name", "TEACHER", "--server.port", port, "--max-num-seqs", 8,
                                 cwd=place) as teacher:
                harness.wait_until(lambda: harness.is_healthy(port) or teacher.poll() is not None, 60, "the teacher's server")
                for number, words in enumerate(found):
                    if words[0] == "inference":  # runs already, at a port that is free
                        continue
                    flags = list(SMALL[words[0]])
                    if words[0] == "rl" and readme.parent.name == "distillation":
                        flags += ["--orchestrator.teacher.client.base-url", f"http://127.0.0.1:{port}/v1"]
                    if words[0] == "rl" and readme.parent.name == "smollm2_word_sums":
                        flags += ["--max-model-len", 1024]  # the small model's tokenizer makes a token of each byte
                    if words[0] in ("rl", "sft", "eval"):
                        flags += ["--output-dir", f"out/{readme.parent.name}-{number}"]
                    prl(*words, *flags, cwd=place, timeout=120, env=variables)


if __name__ == "__main__":
    harness.main(test_every_file_is_accepted_as_it_is, test_every_command_of_a_readme_runs)
