#!/usr/bin/env python3
"""Several trainer ranks: the weights of one rank from `prl rl`, `prl sft` and `prl launch`, their logs, and what a killed rank does."""
import os
import re
import signal

import harness
from harness import check, prl

STEPS = 6
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks of a machine with fewer GPUs than ranks; what they show does not depend on the device


def sft_arguments(folder, out, *flags, steps=STEPS):
    return ["sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 5,
            "--max-steps", steps, "--output-dir", folder / out, "--ckpt", *flags]


def prepare(folder):
    harness.tiny_model(folder / "model")
    harness.sft_data(folder / "data.jsonl", 64)


def weights(out, step=STEPS):
    """Of the tensors: several ranks write a snapshot in several files."""
    return harness.tensor_digest(out / f"weights/step_{step}")


def test_sft_on_three_ranks_gives_the_weights_of_one():
    with harness.workspace("sft-ranks") as folder:
        prepare(folder)
        prl(*sft_arguments(folder, "one"))
        _, console = prl(*sft_arguments(folder, "three", "--deployment.num-gpus", 3))
        check(weights(folder / "three") == weights(folder / "one"), "three ranks gave other weights than one")
        for rank in (1, 2):
            log = (folder / f"three/logs/latest/sft/rank_{rank}.log").read_text()
            check(f"rank {rank} of 3 over gloo" in log, f"log of rank {rank}: {log[-2000:]}")
        check("rank 0 of 3 over gloo" in (folder / "three/logs/latest/sft.log").read_text(), "rank 0 has no log")
        check(harness.check_rows(folder / "three") == {"sft": STEPS}, "rows of metrics.jsonl")
        saved = sorted(path.name for path in (folder / f"three/checkpoints/step_{STEPS}/trainer").iterdir())
        check(saved == ["layout.json", "manifest.json", "progress.json", *(f"rank_{rank}.safetensors" for rank in range(3))], f"{saved}")
        # Saved by three, continued by two.
        prl(*sft_arguments(folder, "three", "--deployment.num-gpus", 2, "--ckpt.resume-step", -1, steps=STEPS + 2))
        prl(*sft_arguments(folder, "one", "--ckpt.resume-step", -1, steps=STEPS + 2))
        check(weights(folder / "three", STEPS + 2) == weights(folder / "one", STEPS + 2), "resumed by two ranks: other weights")


def test_rl_on_three_trainer_ranks_gives_the_weights_of_one_process():
    with harness.workspace("rl-ranks") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        for transport in ("filesystem", "zmq"):
            out = folder / transport
            flags = ["--rollout-transport.type", transport]
            if transport == "zmq":
                flags += ["--rollout-transport.port", harness.free_port()]
            prl("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 3,
                "--inference.server.port", harness.free_port(), *flags)
            check(weights(out) == weights(folder / "one"), f"three ranks over {transport} gave other weights than one process")
            rows = harness.metrics(out)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")
            check("rank 2 of 3" in (out / "logs/latest/trainer/rank_2.log").read_text(), "rank 2 has no log")


def test_layers_that_are_gathered_change_no_bit():
    with harness.workspace("layer-ranks") as folder:
        prepare(folder)
        for dtype in ("float32", "bfloat16"):
            prl(*sft_arguments(folder, f"one-{dtype}", "--compute.dtype", dtype))
            out = folder / f"three-{dtype}"
            prl(*sft_arguments(folder, out.name, "--compute.dtype", dtype, "--deployment.num-gpus", 3, "--model.reshard-after-forward"))
            check(weights(out) == weights(folder / f"one-{dtype}"), f"{dtype}: layers that are gathered gave other weights")
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        for broadcast in ("filesystem", "nccl"):
            out, ports = folder / broadcast, harness.free_ports(2)
            over_nccl = ["--weight-broadcast.port", ports[1], "--weight-broadcast.num-senders", 2]
            flags = ["--weight-broadcast.type", broadcast, *(over_nccl if broadcast == "nccl" else [])]
            prl("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2,
                "--inference.server.port", ports[0], "--trainer.model.reshard-after-forward", *flags)
            check(weights(out) == weights(folder / "one"), f"RL over {broadcast}: layers that are gathered gave other weights")
            check(("2 ranks send engines a part" in (out / "logs/latest/trainer.log").read_text()) == (broadcast == "nccl"), "who sends")
            rows = harness.metrics(out)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "mismatch_kl is not 0")


def test_launch_starts_the_ranks_of_two_nodes():
    with harness.workspace("launch") as folder:
        prepare(folder)
        prl(*sft_arguments(folder, "one"))
        meet = f"127.0.0.1:{harness.free_port()}"

        def node(rank, run_id="a"):
            return ["launch", "--nproc-per-node", 2, "--nnodes", 2, "--node-rank", rank, "--rdzv-endpoint", meet, "--rdzv-id", run_id,
                    *sft_arguments(folder, "nodes", "--model.dp-replicate", 2)]

        with harness.running(*node(0), log=folder / "node0.log") as head:
            _, refused = prl(*node(1, "b"), expect=1)
            check("rdzv_id" in refused and "another run" in refused, refused)
            prl(*node(1))
            check(head.wait(90) == 0, (folder / "node0.log").read_text()[-3000:])
        check(weights(folder / "nodes") == weights(folder / "one"), "two nodes of two ranks gave other weights than one rank")
        check("rank 3 of 4" in (folder / "nodes/logs/latest/sft/rank_3.log").read_text(), "no log of rank 3")
        # Finished already: every rank says so and ends.
        prl("launch", "--nproc-per-node", 2, *sft_arguments(folder, "nodes", "--ckpt.resume-step", -1), timeout=60)
        _, answer = prl(*sft_arguments(folder, "odd", "--model.dp-replicate", 2), expect=1)
        check("model.dp_replicate: 2 copies of the state cannot be divided among 1 trainer rank" in answer, answer)
        _, answer = prl("torchrun", "--nproc-per-node", 2, "src/prime_rl/trainer/sft/train.py", "@", "sft.toml", expect=1)
        check("prl launch --nproc-per-node 2 sft @ sft.toml" in answer, answer)
        _, answer = prl("launch", "--nproc-per-node", 2, expect=1)
        check("what is to be launched is missing" in answer, answer)


def test_a_killed_rank_ends_the_run_with_its_name():
    with harness.workspace("killed-rank") as folder:
        prepare(folder)
        log = folder / "run.log"
        with harness.running(*sft_arguments(folder, "out", "--deployment.num-gpus", 3, steps=100000), log=log) as run:
            harness.wait_until(lambda: harness.rows_of(folder / "out/metrics.jsonl") or run.poll() is not None, 60, "the first step")
            pids = dict(re.findall(r"started (\w+) \(pid (\d+)\)", log.read_text()))
            os.kill(int(pids["sft_rank_2"]), signal.SIGKILL)
            check(run.wait(90) == 1, "the run went on")
        text = log.read_text()
        check("sft_rank_2 was killed by signal 9" in text, text[-3000:])


def test_a_killed_rank_is_started_again_and_changes_no_bit():
    with harness.workspace("healed-rank") as folder:
        prepare(folder)
        steps = 150
        prl(*sft_arguments(folder, "one", steps=steps))
        log = folder / "run.log"
        flags = ["--deployment.num-gpus", 3, "--healing.max-restarts", 3, "--healing.backoff-seconds", 0.1]
        with harness.running(*sft_arguments(folder, "out", *flags, steps=steps), log=log) as run:
            for number, rank in enumerate(("sft_rank_2", "sft"), 1):  # the second time rank 0
                harness.wait_until(lambda: len(harness.rows_of(folder / "out/metrics.jsonl")) > 10 * number or run.poll() is not None, 60, "steps")
                pids = dict(re.findall(r"started (\w+) \(pid (\d+)\)", log.read_text()))
                os.kill(int(pids[rank]), signal.SIGKILL)
                harness.wait_until(lambda: log.read_text().count("a rank was let in") >= number or run.poll() is not None, 60,
                                   "the rank that was started again")
            check(run.wait(360) == 0, log.read_text()[-3000:])
        text = log.read_text()
        check("sft_rank_2 was killed by signal 9" in text and "(1 of 3 losses), it is started again in 0.1 s" in text, text[-3000:])
        check("(2 of 3 losses), it is started again in 0.2 s" in text, text[-3000:])
        check(weights(folder / "out", steps) == weights(folder / "one", steps), "the healed run gave other weights")
        rows = harness.metrics(folder / "out")
        check(rows[steps]["healing/losses"] >= 1, f"losses are not counted: {rows[steps]}")


def test_rl_goes_on_without_a_killed_trainer_rank():
    with harness.workspace("healed-rl") as folder:
        steps = 12
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        sends = ["--weight-broadcast.num-senders", 3]
        layers = ["--trainer.model.reshard-after-forward"]
        cases = [("trainer", "files", [], 2, []), ("trainer_rank_1", "files", [], 2, []), ("trainer_rank_1", "nccl", ["weight-broadcast"], 2, sends), ("trainer", "zmq", ["rollout-transport"], 2, []),
                 ("trainer", "nccl", ["weight-broadcast"], 2, sends), ("trainer_rank_1", "nccl", ["weight-broadcast"], 3, sends + layers),
                 ("trainer", "nccl", ["weight-broadcast"], 3, sends + layers)]
        for rank, transport, sections, num_ranks, more in cases:
            ports = harness.free_ports(2)
            flags = [word for section in sections for word in (f"--{section}.type", transport, f"--{section}.port", ports[1])]
            out, log = folder / f"{rank}_{transport}_{num_ranks}", folder / f"{rank}_{transport}_{num_ranks}.log"
            with harness.running("rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node",
                                 "--deployment.num-train-gpus", num_ranks, "--trainer.healing", "--inference.server.port", ports[0],
                                 *flags, *more, log=log) as run:
                harness.wait_until(lambda: (out / "broadcasts/step_2/STABLE").exists() or run.poll() is not None, 60, "version 2")
                os.kill(harness.role_pids(log)[rank], signal.SIGKILL)
                check(run.wait(360) == 0, f"{log.read_text()[-3000:]}")
            check(weights(out, steps) == weights(folder / "one", steps), f"{rank} killed, {transport}: other weights")


if __name__ == "__main__":
    harness.main(test_sft_on_three_ranks_gives_the_weights_of_one, test_rl_on_three_trainer_ranks_gives_the_weights_of_one_process,
                 test_layers_that_are_gathered_change_no_bit, test_launch_starts_the_ranks_of_two_nodes, test_a_killed_rank_ends_the_run_with_its_name,
                 test_a_killed_rank_is_started_again_and_changes_no_bit, test_rl_goes_on_without_a_killed_trainer_rank)
