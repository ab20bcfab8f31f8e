#!/usr/bin/env python3
"""On a machine with several GPUs: ranks over NCCL give the weights of one GPU bit for bit, in SFT and RL, and a killed rank heals."""
import json
import os
import re
import signal
import time

import harness
from harness import check, prl

STEPS = 6


def num_gpus():
    """Of this machine; the test is skipped where there are fewer than two."""
    report = {row["subject"]: row["found"] for row in json.loads(prl("doctor", "--json")[0])}
    num = len(re.findall(r"\(compute \d", report.get("gpu", "")))
    if num < 2:
        raise harness.Skip(f"{num} GPUs")
    return num


def ranks_to_try():
    return [n for n in (2, 4, 8) if n <= num_gpus()]


def weights(out, step=STEPS):
    return harness.tensor_digest(out / f"weights/step_{step}")


def prepare(folder, *model):
    harness.tiny_model(folder / "model", *model)
    harness.sft_data(folder / "data.jsonl", 64)


def sft_arguments(folder, out, *flags, steps=STEPS):
    return ["sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 5,
            "--max-steps", steps, "--output-dir", folder / out, "--ckpt", "--compute.device", "cuda", *flags]


def test_sft_over_nccl_gives_the_weights_of_one_gpu():
    counts = ranks_to_try()
    with harness.workspace("gpu-sft-ranks") as folder:
        prepare(folder)
        for dtype in ("float32", "bfloat16"):
            prl(*sft_arguments(folder, f"one-{dtype}", "--compute.dtype", dtype))
            for ranks in counts:
                out = folder / f"{ranks}-{dtype}"
                prl(*sft_arguments(folder, out.name, "--compute.dtype", dtype, "--deployment.num-gpus", ranks))
                check(weights(out) == weights(folder / f"one-{dtype}"), f"{ranks} ranks in {dtype} gave other weights than one")
                check(f"rank 0 of {ranks} over nccl" in (out / "logs/latest/sft.log").read_text(), "the ranks did not talk over NCCL")
        prl(*sft_arguments(folder, "fast", "--model.reduce", "fast", "--deployment.num-gpus", counts[0]))
        one, fast = harness.metrics(folder / "one-bfloat16"), harness.metrics(folder / "fast")
        worst = max(abs(one[step]["loss/mean"] - fast[step]["loss/mean"]) for step in one)
        check(worst < 0.01, f"fast sums train something else: losses differ by {worst}")


def test_layers_gathered_over_nccl_give_the_weights_of_one_gpu():
    counts = ranks_to_try()
    with harness.workspace("gpu-gathered") as folder:
        prepare(folder)
        for dtype in ("float32", "bfloat16"):
            prl(*sft_arguments(folder, f"one-{dtype}", "--compute.dtype", dtype))
            for ranks in counts:
                out = folder / f"{ranks}-{dtype}"
                prl(*sft_arguments(folder, out.name, "--compute.dtype", dtype, "--model.reshard-after-forward", "--deployment.num-gpus", ranks))
                check(weights(out) == weights(folder / f"one-{dtype}"), f"layers gathered by {ranks} ranks in {dtype}: other weights than one")
        lora = ["--model.lora.rank", 8, "--ckpt.weights.save-adapter-separately"]
        prl(*sft_arguments(folder, "one-adapter", *lora))
        for ranks in counts:
            out = folder / f"{ranks}-adapter"
            prl(*sft_arguments(folder, out.name, *lora, "--model.reshard-after-forward", "--deployment.num-gpus", ranks))
            check(weights(out) == weights(folder / "one-adapter"), f"an adapter of layers gathered by {ranks} ranks: other weights than one")


EXPERTS = ("--family", "qwen3_moe", "--num-experts", 16, "--num-experts-per-tok", 4, "--moe-intermediate-size", 64)


def test_experts_divided_over_nccl_give_the_weights_of_one_gpu():
    counts = ranks_to_try()
    with harness.workspace("gpu-experts") as folder:
        prepare(folder, *EXPERTS)
        for dtype in ("float32", "bfloat16"):
            prl(*sft_arguments(folder, f"one-{dtype}", "--compute.dtype", dtype))
            for ranks in counts:
                for flags in ([], ["--model.ac"]):
                    out = folder / f"{ranks}-{dtype}-{len(flags)}"
                    prl(*sft_arguments(folder, out.name, "--compute.dtype", dtype, "--model.ep", ranks, "--deployment.num-gpus", ranks, *flags))
                    check(weights(out) == weights(folder / f"one-{dtype}"), f"experts of {ranks} ranks in {dtype} {flags}: other weights than one")


def test_rl_over_nccl_gives_the_weights_of_one_process():
    counts = ranks_to_try()
    with harness.workspace("gpu-rl-ranks") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt", "--trainer.compute.device", "cuda")
        for ranks in counts:
            for broadcast in ("filesystem", "nccl"):
                ports, out = harness.free_ports(2), folder / f"{ranks}-{broadcast}"
                flags = ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[1]] if broadcast == "nccl" else []
                prl("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", ranks,
                    "--inference-gpu-ids", "[0]", "--trainer-gpu-ids", json.dumps(list(range(ranks))), "--inference.gpu-memory-utilization", 0.1,
                    "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda", "--inference.server.port", ports[0], *flags)
                check(weights(out) == weights(folder / "one"), f"{ranks} ranks, weights by {broadcast}: other weights than one process")
                rows = harness.metrics(out)
                check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")


def test_an_engine_on_two_gpus_gives_the_weights_of_one_process():
    # A trainer that has a GPU of its own sends weights to the engine's first one.
    trainers = {"filesystem": 0, "nccl": 0, **({"linked": 2} if num_gpus() > 2 else {})}
    with harness.workspace("gpu-shared-layers") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt", "--trainer.compute.device", "cuda")
        for broadcast, gpu in trainers.items():
            ports, out = harness.free_ports(2), folder / broadcast
            flags = ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[1]] if broadcast != "filesystem" else []
            prl("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--inference.parallel.tp", 2,
                "--inference.log.level", "debug", "--inference-gpu-ids", "[0, 1]", "--trainer-gpu-ids", json.dumps([gpu]), "--inference.gpu-memory-utilization", 0.1,
                "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda", "--inference.server.port", ports[0], *flags)
            check(weights(out) == weights(folder / "one"), f"weights by {broadcast}: other weights than one process")
            rows = harness.metrics(out)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")
            text = (out / "logs/latest/inference.log").read_text()
            check("on 2 devices that share the layers" in text, "the engine had one GPU")
            check(broadcast != "linked" or text.count("linked the devices") >= STEPS - 1, f"no link: {text[-3000:]}")


def test_gpus_that_share_rows_give_the_weights_of_one():
    counts = ranks_to_try()
    with harness.workspace("gpu-cp") as folder:
        prepare(folder, "--num-kv-heads", 4)
        for dtype in ("float32", "bfloat16"):
            flags = ["--compute.dtype", dtype, "--model.cp-style", "ulysses", "--model.leaves-per-row", 4]
            prl(*sft_arguments(folder, f"one-{dtype}", *flags))
            for cp in (n for n in counts if n <= 4):
                out = folder / f"{cp}-{dtype}"
                prl(*sft_arguments(folder, out.name, *flags, "--model.cp", cp, "--deployment.num-gpus", cp))
                check(weights(out) == weights(folder / f"one-{dtype}"), f"rows shared by {cp} GPUs in {dtype} gave other weights")


def test_a_killed_rank_heals():
    num_gpus()
    with harness.workspace("gpu-healed") as folder:
        prepare(folder)
        steps = 300
        prl(*sft_arguments(folder, "one", steps=steps))
        log = folder / "run.log"
        flags = ["--deployment.num-gpus", 2, "--healing.max-restarts", 3, "--healing.backoff-seconds", 0.1]
        with harness.running(*sft_arguments(folder, "out", *flags, steps=steps), log=log) as run:
            harness.wait_until(lambda: len(harness.rows_of(folder / "out/metrics.jsonl")) > 10 or run.poll() is not None, 60, "steps")
            os.kill(harness.role_pids(log)["sft_rank_1"], signal.SIGKILL)
            # Long before dist_timeout_seconds.
            harness.wait_until(lambda: "a rank was let in" in log.read_text() or run.poll() is not None, 90, "the rank that was started again")
            check(run.wait(360) == 0, log.read_text()[-3000:])
        check(weights(folder / "out", steps) == weights(folder / "one", steps), "the healed run gave other weights")
        rows = harness.metrics(folder / "out")
        seconds = [row["healing/recover_seconds"] for row in rows.values() if row.get("healing/recover_seconds")]
        print(f"      went on after {seconds} s")
        check(rows[steps]["healing/losses"] >= 1, f"losses are not counted: {rows[steps]}")


def test_rl_goes_on_without_a_killed_rank_or_engine():
    num_gpus()
    with harness.workspace("gpu-healed-rl") as folder:
        steps = 12
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt", "--trainer.compute.device", "cuda")
        for role in ("trainer_rank_1", "inference"):
            out, log = folder / role, folder / f"{role}.log"
            with harness.running("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2,
                                 "--trainer.healing", "--inference-gpu-ids", "[0]", "--trainer-gpu-ids", "[0, 1]",
                                 "--inference.gpu-memory-utilization", 0.1, "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda",
                                 "--inference.server.port", harness.free_port(), log=log) as run:
                harness.wait_until(lambda: (out / "broadcasts/step_2/STABLE").exists() or run.poll() is not None, 60, "version 2")
                begin = time.monotonic()
                os.kill(harness.role_pids(log)[role], signal.SIGKILL)
                newest = lambda: max((int(path.parent.name[5:]) for path in (out / "broadcasts").glob("step_*/STABLE")), default=0)  # noqa: E731
                at = newest()
                harness.wait_until(lambda: newest() > at + 1 or run.poll() is not None, 60, "two steps more")
                print(f"      {role}: two more versions {time.monotonic() - begin:.1f} s after its death")
                check(run.wait(120) == 0, log.read_text()[-3000:])
            check(weights(out, steps) == weights(folder / "one", steps), f"{role} was killed: other weights")


def linked_rl(config, out, *flags):
    """A trainer and an engine with a GPU each, which can only get weights over a link of the two."""
    ports = harness.free_ports(2)
    return ["rl", "@", config, "--output-dir", out, "--ckpt", "--log.level", "debug", "--deployment.type", "single_node", "--trainer-gpu-ids", "[0]",
            "--inference-gpu-ids", "[1]", "--trainer.compute.device", "cuda", "--inference.compute.device", "cuda", "--inference.server.port", ports[0],
            "--inference.gpu-memory-utilization", 0.1, "--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[1], *flags]


def logs(out):
    return "".join(path.read_text(errors="replace") for path in sorted((out / "logs").rglob("*.log")))


def test_weights_go_from_gpu_to_gpu():
    num_gpus()
    with harness.workspace("gpu-linked") as folder:
        for lag in (0, 1):
            config = harness.rl_config(folder / f"rl-{lag}.toml", harness.warm_model(), max_async_level=lag, max_steps=STEPS)
            out = folder / f"linked-{lag}"
            prl(*linked_rl(config, out))
            text = logs(out)
            linked, hosted = text.count("linked the devices"), text.count("host memory in")
            # In lock-step the engine takes every version. Else, as steps take a few milliseconds, it may pass over some, and those that it
            # takes may be former ones, which the trainer has moved to host memory.
            check(linked >= STEPS - 1 and hosted == 0 if lag == 0 else linked + hosted > 0, f"{linked} linked, {hosted} through host memory: {text[-3000:]}")
            rows = harness.metrics(out)
            check(lag > 0 or all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")
        prl("rl", "@", folder / "rl-0.toml", "--output-dir", folder / "one", "--ckpt", "--trainer.compute.device", "cuda")
        check(weights(folder / "linked-0") == weights(folder / "one"), "weights over a link gave another run than one process")


def test_an_engine_that_was_killed_is_linked_again():
    num_gpus()
    with harness.workspace("gpu-linked-again") as folder:
        steps = 30
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt", "--trainer.compute.device", "cuda")
        out, log = folder / "killed", folder / "killed.log"
        with harness.running(*linked_rl(config, out, "--trainer.healing"), log=log) as run:
            harness.wait_until(lambda: (out / "broadcasts/step_2/STABLE").exists() or run.poll() is not None, 60, "version 2")
            os.kill(harness.role_pids(log)["inference"], signal.SIGKILL)
            check(run.wait(240) == 0, log.read_text()[-3000:])
        check(weights(out, steps) == weights(folder / "one", steps), "the engine was killed: other weights")
        check("linked the devices" in logs(out), "no link")


if __name__ == "__main__":
    harness.main(test_sft_over_nccl_gives_the_weights_of_one_gpu, test_layers_gathered_over_nccl_give_the_weights_of_one_gpu,
                 test_experts_divided_over_nccl_give_the_weights_of_one_gpu,
                 test_rl_over_nccl_gives_the_weights_of_one_process, test_an_engine_on_two_gpus_gives_the_weights_of_one_process,
                 test_gpus_that_share_rows_give_the_weights_of_one, test_a_killed_rank_heals,
                 test_rl_goes_on_without_a_killed_rank_or_engine, test_weights_go_from_gpu_to_gpu, test_an_engine_that_was_killed_is_linked_again)
