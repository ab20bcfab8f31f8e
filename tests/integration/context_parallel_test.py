#!/usr/bin/env python3
"""Rows that ranks share (`model.cp`): the weights of one rank, in SFT and RL, and what is refused."""
import os

import harness
from harness import check, prl

STEPS = 10
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def weights(out):
    return harness.tensor_digest(out / f"weights/step_{STEPS}")


def ulysses(cp, leaves=4, section=""):
    return [f"--{section}model.cp", cp, f"--{section}model.leaves-per-row", leaves]


def test_fine_tuning_gives_the_weights_of_one_rank():
    with harness.workspace("cp-sft") as folder:
        harness.tiny_model(folder / "model", "--num-kv-heads", 4)
        harness.sft_data(folder / "data.jsonl", 64)

        def train(out, *flags):
            prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 3,
                "--max-steps", STEPS, "--optim.lr", "1e-2", "--output-dir", folder / out, "--ckpt", *flags)
            return weights(folder / out)
        for dtype, more in (("float32", []), ("bfloat16", []), ("float32", ["--model.lora.rank", 4, "--model.lora.dropout", 0.1])):
            of_dtype = ["--compute.dtype", dtype, *more]
            name = f"{dtype}{'-lora' if more else ''}"
            one = train(f"{name}-1", *ulysses(1), *of_dtype)
            check(train(f"{name}-whole", *of_dtype) != one, "four leaves gave the bits of one: the key does nothing")
            for cp, ranks in ((2, 2), (2, 4), (4, 4)) if name == "float32" else ((2, 2),):
                out = f"{name}-{cp}-{ranks}"
                check(train(out, *ulysses(cp), "--deployment.num-gpus", ranks, *of_dtype) == one, f"{out}: other weights than one rank")


def rl_gives_the_weights_of_one_process(*flags):
    with harness.workspace("cp-rl") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt", *ulysses(1, 2, "trainer."), *flags)
        prl("rl", "@", config, "--output-dir", folder / "two", "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2,
            "--inference.server.port", harness.free_port(), *ulysses(2, 2, "trainer."), *flags)
        check(weights(folder / "two") == weights(folder / "one"), "two ranks that share rows gave other weights than one process")
        rows = harness.metrics(folder / "two")
        check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")


def test_rl_gives_the_weights_of_one_process():
    rl_gives_the_weights_of_one_process()


def test_rl_of_an_adapter_gives_the_weights_of_one_process():
    rl_gives_the_weights_of_one_process("--trainer.model.lora.rank", 4, "--trainer.model.lora.alpha", 16, "--trainer.optim.lr", "5e-3")


def test_what_does_not_go_is_refused_by_name():
    with harness.workspace("cp-bad") as folder:
        harness.tiny_model(folder / "model")  # four query heads, two key-value heads
        harness.sft_data(folder / "data.jsonl", 8)
        base = ["sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 64, "--max-steps", 1]
        cases = [(["--model.cp", 2, "--model.cp-style", "ring", "--deployment.num-gpus", 2], 'ring attention; leave cp_style out'),
                 ([*ulysses(4), "--deployment.num-gpus", 4], "4 query heads and 2 key-value heads"),
                 ([*ulysses(2), "--deployment.num-gpus", 3], "model.cp: 2 ranks to a row cannot divide 3 trainer ranks"),
                 ([*ulysses(2)], "model.cp: 2 ranks to a row cannot divide 1 trainer rank"),
                 (["--model.dp-replicate", 2], "model.dp_replicate: 2 copies of the state cannot be divided among 1 trainer rank"),
                 ([*ulysses(3, 3)], "model.cp"), ([*ulysses(2, 3)], "model.leaves_per_row")]
        rl = ["rl", "@", harness.rl_config(folder / "rl.toml", folder / "model")]
        one_rank = "must divide the number of trainer ranks, which is 1 in this deployment"
        commands = [([*base, *flags], wanted) for flags, wanted in cases] + [
            ([*rl, "--trainer.model.cp", 2], one_rank), ([*rl, "--trainer.model.dp-replicate", 2], one_rank),
            ([*rl, *ulysses(4, 4, "trainer."), "--deployment.type", "single_node", "--deployment.num-train-gpus", 4], "4 query heads and 2 key-value heads")]
        out = folder / "bad"
        for command, wanted in commands:
            for dry in ([], ["--dry-run"]):
                _, answer = prl(*command, *dry, "--output-dir", out, expect=1)
                told = " ".join(answer.replace("\u2502", " ").split())  # a box of lines, if it is about the configuration
                check(wanted in told, f"{command} {dry}: {wanted!r} is missing:\n{answer[-3000:]}")
                # Nothing was started: a start leaves a log and the folders of its roles.
                left = [path for path in out.rglob("*") if path.is_file() and path.parent.name != "configs"]
                check(not left, f"{command} {dry}: found out before anything started? {left}")
        # What a launcher or a job will start.
        launch = ["launch", "--nproc-per-node", 3, *base]
        for command, wanted in (([*launch, *ulysses(2)], "2 ranks to a row cannot divide 3 trainer ranks"),
                                ([*launch, "--model.dp-replicate", 2], "2 copies of the state cannot be divided among 3 trainer ranks"),
                                (["launch", "--nproc-per-node", 4, *base, *ulysses(4)], "4 query heads and 2 key-value heads"),
                                ([*base, *ulysses(4), "--slurm", "--deployment.num-gpus", 4], "4 query heads and 2 key-value heads"),
                                ([*rl, *ulysses(4, 4, "trainer."), "--slurm", "--deployment.type", "single_node", "--deployment.num-train-gpus", 4],
                                 "4 query heads and 2 key-value heads")):
            _, answer = prl(*command, "--dry-run", "--output-dir", out, expect=1)
            check(wanted in answer, f"{command}: {wanted!r} is missing:\n{answer[-3000:]}")
            check("is valid" not in answer, f"{command}: called valid:\n{answer[-3000:]}")
        prl("launch", "--nproc-per-node", 2, *base, *ulysses(2), "--dry-run", "--output-dir", folder / "good")


if __name__ == "__main__":
    harness.main(test_fine_tuning_gives_the_weights_of_one_rank, test_rl_gives_the_weights_of_one_process,
                 test_rl_of_an_adapter_gives_the_weights_of_one_process, test_what_does_not_go_is_refused_by_name)
