#!/usr/bin/env python3
"""docs/guide.md as it is written: its script, its files and its commands, in its order, with fewer steps."""
import json
import re
import shlex
import subprocess
import sys

import harness
from harness import check, prl

GUIDE = harness.ROOT / "docs/guide.md"
# What makes the guide's runs small. Each text must occur: a guide with other numbers needs other lines here.
SMALLER = [
    ("max_steps = 240", "max_steps = 4"), ("step_240", "step_4"), ("warmup_steps = 10", "warmup_steps = 1"),
    ("decay_steps = 230", "decay_steps = 2"), ("max_steps = 40", "max_steps = 2"), ("--max-steps 60", "--max-steps 3"),
    ("step_60", "step_3"), ("interval = 20", "interval = 1"), ("batch_size = 256", "batch_size = 16"),
    ("num_examples = 200", "num_examples = 8"), ("localhost:8000", "localhost:PORT"),
]
# Models of four steps know nothing, so all rewards are equal; and short evaluations are enough.
EXTRA = {"rl": ["--orchestrator.train.filter-zero-advantages", "false"], "eval": ["--num-examples", 8]}


def guide():
    text = GUIDE.read_text()
    for written, small in SMALLER:
        check(written in text, f"the guide no longer holds `{written}`: change SMALLER in this test")
        text = text.replace(written, small)
    return text


def commands(text):
    """The commands of the guide's blocks, as words, continued lines joined; what they print is left out."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language:
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = line.removeprefix("$ ")
            if re.match(r"(prl|curl) ", line):
                found.append(shlex.split(line, comments=True))
    return found


def write_files(text, place):
    """The files that the guide shows: `name`: before a block of TOML, and the script."""
    for name, block in re.findall(r"^`([\w.]+\.toml)`:\n\n```toml\n(.*?)^```", text, re.M | re.S):
        (place / name).write_text(block)
    script = re.search(r"^```python\n(.*?)^```", text, re.M | re.S).group(1)
    subprocess.run([sys.executable, "-c", script], cwd=place, check=True, timeout=60)


def serve(words, curl, place):
    """`prl inference` and the request that the guide sends to it."""
    port = harness.free_port()
    with harness.running(*words, "--server.port", port, cwd=place, log=place / "server.log"):
        harness.wait_until(lambda: harness.is_healthy(port), 60, "the server of the guide")
        body = json.loads(curl[curl.index("-d") + 1])
        status, reply = harness.request(port, "POST", curl[1].split("localhost:PORT")[1], body)
        check(status == 200 and reply["usage"]["completion_tokens"] > 0, f"the guide's request was answered {status}: {reply}")


def test_the_guide_runs_as_it_is_written():
    text = guide()
    with harness.workspace("guide") as place:
        write_files(text, place)
        lines = commands(text)
        names = [words[1] for words in lines if words[0] == "prl"]
        check(names == ["doctor", "init-model", "sft", "rl", "rl", "eval", "inference"], f"the guide's commands are {names}")
        for words, following in zip(lines, [*lines[1:], None]):
            if words[0] == "curl":
                continue
            if words[1] == "inference":
                serve(words[1:], following, place)
            else:
                out, err = prl(*words[1:], *EXTRA.get(words[1], []), cwd=place)
                if words[1] == "rl":
                    check("weight updates proven, probe_diff=0" in out + err, f"no proof in the output of {words}: {out}{err}")
        check((place / "outputs/rl/weights/step_3/model.safetensors").is_file(), "the resumed run wrote no weights of its last step")
        results = list((place / "outputs/eval").glob("evals/*/*/metadata.json"))
        steps = sorted(json.loads(path.read_text())["ckpt_step"] for path in results)
        check(steps == [0, 1, 2, 3], f"the base model and every checkpoint were to be evaluated, found steps {steps}")


if __name__ == "__main__":
    harness.main(test_the_guide_runs_as_it_is_written)
