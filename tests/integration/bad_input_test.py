#!/usr/bin/env python3
"""Broken files, wrong configurations and full disks: each ends with one message that names the file or key, and never with a crash."""
import contextlib
import json
import os
import shutil
import subprocess

import harness
from harness import check, prl


def fails(*arguments, words=(), cwd=None, env=None):
    """Runs prl, which must end with status 1 and one message that holds all `words`."""
    stdout, stderr = prl(*arguments, expect=1, cwd=cwd, timeout=60, env=env)
    for word in words:
        check(str(word) in stderr, f"prl {' '.join(map(str, arguments))}: the message lacks {str(word)!r}:\n{stderr[-3000:]}")
    for bad in ("internal error", "terminate called", "Traceback", "std::", "Assertion"):
        check(bad not in stderr, f"prl {' '.join(map(str, arguments))}: the message is a crash:\n{stderr[-3000:]}")
    return stderr


@contextlib.contextmanager
def broken_model(change):
    """A copy of the warm model that `change` has damaged."""
    with harness.workspace("broken") as folder:
        model = folder / "model"
        shutil.copytree(harness.warm_model(), model)
        change(model)
        yield model


def edit_config(**keys):
    def change(model):
        config = json.loads((model / "config.json").read_text())
        config.update(keys)
        (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return change


def cut(name, keep):
    def change(model):
        data = (model / name).read_bytes()
        (model / name).write_bytes(data[:int(len(data) * keep)])
    return change


def overwrite(name, data):
    return lambda model: (model / name).write_bytes(data)


def test_broken_model_folders_are_named():
    cases = {
        "no config.json": (lambda model: (model / "config.json").unlink(), ["config.json"]),
        "config.json is no JSON": (overwrite("config.json", b"{"), ["config.json"]),
        "config.json without hidden_size": (edit_config(hidden_size=None), ["config.json", "hidden_size"]),
        "hidden_size is text": (edit_config(hidden_size="big"), ["config.json", "hidden_size"]),
        "hidden_size is negative": (edit_config(hidden_size=-64), ["config.json", "hidden_size"]),
        "hidden_size is absurd": (edit_config(hidden_size=1 << 40), ["config.json"]),
        "heads do not divide": (edit_config(num_attention_heads=3), ["config.json"]),
        "another family": (edit_config(model_type="mamba", architectures=["MambaForCausalLM"]), ["mamba"]),
        "other shapes than the weights": (edit_config(intermediate_size=96), ["safetensors"]),
        "more layers than the weights": (edit_config(num_hidden_layers=3), ["layers.2"]),
        "no weights": (lambda model: (model / "model.safetensors").unlink(), ["safetensors"]),
        "weights cut": (cut("model.safetensors", 0.7), ["model.safetensors"]),
        "weights cut in the header": (cut("model.safetensors", 0.001), ["model.safetensors"]),
        "weights empty": (overwrite("model.safetensors", b""), ["model.safetensors"]),
        "weights are text": (overwrite("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n" * 3), ["model.safetensors"]),
        "header length absurd": (overwrite("model.safetensors", b"\xff" * 64), ["model.safetensors"]),
        "no tokenizer.json": (lambda model: (model / "tokenizer.json").unlink(), ["tokenizer.json"]),
        "tokenizer.json cut": (cut("tokenizer.json", 0.5), ["tokenizer.json"]),
        "tokenizer.json empty": (overwrite("tokenizer.json", b""), ["tokenizer.json"]),
        "tokenizer.json of another kind": (overwrite("tokenizer.json", b'{"model": {"type": "Unigram"}}'), ["tokenizer.json"]),
        "tokenizer_config.json cut": (cut("tokenizer_config.json", 0.5), ["tokenizer_config.json"]),
    }
    for name, (change, words) in cases.items():
        with broken_model(change) as model:
            try:
                fails("inference", "--model.name", model, "--server.port", harness.free_port(), words=[*words, model])
            except harness.Failure as failure:
                raise harness.Failure(f"{name}: {failure}") from None


def test_every_role_names_a_missing_model():
    with harness.workspace("missing") as folder:
        nowhere = folder / "nowhere"
        config = harness.rl_config(folder / "rl.toml", nowhere)
        for arguments in (["rl", "@", config, "--output-dir", folder / "rl"], ["inference", "--model.name", nowhere],
                          ["trainer", "--model.name", nowhere, "--data.fake", "--max-steps", 1, "--output-dir", folder / "t"],
                          ["orchestrator", "--student.model.name", nowhere, "--output-dir", folder / "o"],
                          ["sft", "--model.name", nowhere, "--data.name", nowhere, "--max-steps", 1, "--output-dir", folder / "s"]):
            fails(*arguments, words=[nowhere, "prl init-model"])


def test_wrong_configurations_are_all_reported_at_once():
    with harness.workspace("config") as folder:
        path = folder / "bad.toml"
        path.write_text('max_steps = "many"\nseq_lenn = 3\n[orchestrator]\nbatch_size = -4\ngroup_size = true\n[trainer.optim]\nlr = "fast"\n'
                        'type = "adamm"\n[nonsense]\nx = 1\n')
        text = fails("rl", "@", path, words=["max_steps", "seq_lenn", "seq_len", "batch_size", "group_size", "adamm", "nonsense", "bad.toml"])
        check(text.count("bad.toml") >= 5, f"the problems do not all name the file: {text}")
        path.write_text("max_steps = \n")
        fails("rl", "@", path, words=["bad.toml", "1"])
        path.write_bytes(b"\xff\xfe\x00")
        fails("rl", "@", path, words=["bad.toml"])
        fails("rl", "@", folder / "none.toml", words=["none.toml"])
        fails("rl", "@", words=["@"])
        fails("rl", "--max-stepps", 3, words=["--max-stepps", "max_steps"])
        fails("rl", "--max-steps", words=["max-steps"])
        fails("sft", "--model.name", harness.warm_model(), "--data.batch-size", 0, words=["data.batch-size"])
        path.write_text('toml_files = ["bad.toml"]\n')
        fails("rl", "@", path, words=["bad.toml"])
        (folder / "x.yaml").write_text("a: 1")
        fails("rl", "@", folder / "x.yaml", words=["x.yaml"])


def test_prompts_that_do_not_fit_are_explained():
    with harness.workspace("overlong") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), seq_len=64)
        config.write_text(config.read_text().replace("max_model_len = 256", "max_model_len = 64"))
        fails("rl", "@", config, "--output-dir", folder / "out", words=["orchestrator", "no room for an answer", "max_model_len"])


def test_broken_data_is_named_with_its_line():
    with harness.workspace("data") as folder:
        def sft(name, text, *words):
            (folder / name).write_bytes(text)
            fails("sft", "--model.name", harness.warm_model(), "--data.name", folder / name, "--data.seq-len", 128, "--data.batch-size", 1,
                  "--max-steps", 1, "--output-dir", folder / "out", words=[folder / name, *words])

        good = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
        sft("cut.jsonl", good + b'{"messages":[{"role":"us\n', "2")
        sft("other.jsonl", good + b'{"text":"x"}\n', "2")
        sft("empty.jsonl", b"")
        sft("type.jsonl", b'{"messages":"hello"}\n', "1")
        fails("sft", "--model.name", harness.warm_model(), "--data.name", folder / "none.jsonl", "--max-steps", 1, "--output-dir",
              folder / "out", words=["none.jsonl"])
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1)
        (folder / "tasks.jsonl").write_text('{"prompt": "abc"}\n{"promt": "abc"}\n')
        text = config.read_text().replace('"mode": ', "").replace("args = {", f'args = {{ dataset_path = "{folder / "tasks.jsonl"}", ')
        config.write_text(text)
        fails("rl", "@", config, "--output-dir", folder / "rl", words=["tasks.jsonl", "2"])
        config.write_text(text.replace("alphabet", "alphabett").replace(f'dataset_path = "{folder / "tasks.jsonl"}", ', ""))
        fails("rl", "@", config, "--output-dir", folder / "rl", words=["alphabett", "reverse-text"])


def test_folders_that_cannot_be_written_are_named():
    with harness.workspace("output") as folder:
        (folder / "file").write_text("")
        out = folder / "file/out"
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1)
        fails("rl", "@", config, "--output-dir", out, words=[out])
        fails("sft", "--model.name", harness.warm_model(), "--data.name", harness.sft_data(folder / "d.jsonl", 8), "--max-steps", 1,
              "--output-dir", out, words=[out])
        fails("make-data", "--output", out / "x.jsonl", words=[out])
        fails("init-model", out, words=[out])
        fails("eval", "--model.name", harness.warm_model(), "--env.id", "reverse-text", "--num-examples", 1, "--output-dir", out, words=[out])


@contextlib.contextmanager
def small_disk(folder, size):
    if os.geteuid() != 0:
        raise harness.Skip("a file system of its own needs root")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        raise harness.Skip(f"mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved():
    with harness.workspace("disk") as folder, small_disk(folder / "disk", "7m") as disk:
        model = harness.warm_model()
        config = harness.rl_config(folder / "rl.toml", model, max_steps=200, max_async_level=0)
        out = disk / "out"
        stderr = fails("rl", "@", config, "--output-dir", out, "--ckpt.interval", 1, words=["No space left on device", str(disk)])
        steps = sorted(int(path.parent.parent.name[5:]) for path in out.glob("checkpoints/step_*/trainer/manifest.json"))
        check(steps, f"nothing was saved before the disk was full: {stderr[-2000:]}")
        # The file system has room again: what was saved whole is where the run goes on.
        for path in out.glob("rollouts/step_*"):
            shutil.rmtree(path)
        for step in steps[:-2]:
            shutil.rmtree(out / f"checkpoints/step_{step}")
            shutil.rmtree(out / f"weights/step_{step}")
        last = steps[-1] + 1
        prl("rl", "@", config, "--output-dir", out, "--ckpt", "--ckpt.resume-step", -1, "--max-steps", last)
        check("resumed from" in (out / "logs/latest/trainer.log").read_text(), "no resume")
        whole = folder / "whole"
        prl("rl", "@", config, "--output-dir", whole, "--ckpt", "--max-steps", last)
        check(harness.digest(whole / f"weights/step_{last}", "*.safetensors") == harness.digest(out / f"weights/step_{last}", "*.safetensors"),
              "the resumed run gave other weights")


harness.main(test_broken_model_folders_are_named, test_every_role_names_a_missing_model,
             test_wrong_configurations_are_all_reported_at_once, test_prompts_that_do_not_fit_are_explained,
             test_broken_data_is_named_with_its_line,
             test_folders_that_cannot_be_written_are_named, test_a_full_disk_ends_the_run_and_keeps_what_was_saved)
