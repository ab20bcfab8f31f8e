#!/usr/bin/env python3
"""Commands with [slurm]: the script that is written, and jobs on a real SLURM cluster of loopback nodes."""
import json
import os
import re
import signal
import subprocess

import harness
import slurm_cluster
from harness import check, prl


def sft_config(folder, steps):
    model, data = folder / "model", folder / "data.jsonl"
    if not model.exists():
        harness.tiny_model(model)
        harness.sft_data(data, 64)
    return ["sft", "--model.name", model, "--data.name", data, "--data.seq-len", 128, "--data.batch-size", 4, "--max-steps", steps,
            "--compute.device", "cpu", "--optim.lr", "1e-3", "--log.level", "info"]


def submitted(cluster, *arguments, env=None):
    """Submits and returns the job's number and its log file."""
    _, text = prl(*arguments, env={**cluster.env, **(env or {})})
    found = re.search(r"submitted job (\d+); follow it with `tail -F (\S+)`", text)
    check(found, f"no job was submitted:\n{text}")
    return found.group(1), found.group(2)


def read(path):
    with open(path, errors="replace") as file:
        return file.read()


def steps_of(out):
    """Steps in metrics.jsonl, in its order; the last line may still be being written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def test_a_dry_run_writes_script_and_configuration():
    with harness.workspace("slurm-dry") as folder:
        out = folder / "my out"
        prl(*sft_config(folder, 4), "--output-dir", out, "--slurm.partition", "gpu", "--slurm.time", "1:30:00", "--slurm.account", "team",
            "--slurm.pre-run-command", "module load x && echo \"y\"", "--slurm.job-name", "mine", "--ckpt", "--dry-run")
        script = read(out / "mine.sbatch")
        for line in ("#SBATCH --job-name=mine", "#SBATCH --partition=gpu", "#SBATCH --account=team", "#SBATCH --time=1:30:00",
                     "#SBATCH --nodes=1", "#SBATCH --exclusive", "module load x && echo \"y\"", "--kill-on-bad-exit=1",
                     f"#SBATCH --output=\"{out}/job_%j.log\"", f" sft @ '{out}/configs/sft.toml'"):
            check(line in script, f"'{line}' is not in the script:\n{script}")
        check("gres" not in script, "a job of the CPU asks for GPUs")
        check((out / "configs/sft.toml").exists(), "the configuration was not written")
        done = subprocess.run(["bash", "-n", out / "mine.sbatch"], capture_output=True, text=True)
        check(done.returncode == 0, f"bash cannot read the script: {done.stderr}")
        # A script that somebody changed is theirs; one that is as it was gives way.
        again = (*sft_config(folder, 4), "--output-dir", out, "--slurm.job-name", "mine", "--dry-run")
        prl(*again)
        check("gpu" not in read(out / "mine.sbatch"), "the script was not written anew")
        (out / "mine.sbatch").write_text(read(out / "mine.sbatch").replace("#SBATCH --nodes=1", "#SBATCH --nodes=1 --nice"))
        (out / "other.sbatch").write_text("#!/bin/sh\necho mine\n")
        for name in ("mine", "other"):
            before = read(out / f"{name}.sbatch")
            _, text = prl(*again[:-2], name, "--dry-run", expect=1)
            check(f"{name}.sbatch" in text and "it stays" in text, text)
            check(read(out / f"{name}.sbatch") == before, f"{name}.sbatch was replaced")
        prl(*sft_config(folder, 4), "--output-dir", out, "--slurm", "--compute.device", "cuda", "--dry-run")
        check("#SBATCH --gres=gpu:1\n" in read(out / "prime-rl.sbatch"), "a job of the GPU asks for none")


def test_bad_values_are_named():
    with harness.workspace("slurm-bad") as folder:
        for key, value in (("partition", "a\n#SBATCH --uid=0"), ("job-name", "../x"), ("time", "1 hour")):
            _, text = prl(*sft_config(folder, 4), "--output-dir", folder / "out", f"--slurm.{key}", value, "--dry-run", expect=1)
            check(f"slurm.{key.replace('-', '_')}" in text, f"the error does not name slurm.{key}:\n{text}")
        template = folder / "own.j2"
        template.write_text("{{ job_name }\n")
        _, text = prl(*sft_config(folder, 4), "--output-dir", folder / "out", "--slurm.template-path", template, "--dry-run", expect=1)
        check("own.j2" in text, f"the error does not name the template:\n{text}")
        _, text = prl(*sft_config(folder, 4), "--output-dir", folder / "out", "--slurm", env={"PATH": "/nonexistent:/bin"}, expect=1)
        check("sbatch" in text, f"the error does not say what is missing:\n{text}")


def test_fine_tuning_runs_as_a_job():
    with harness.workspace("slurm-sft") as folder, slurm_cluster.cluster(2) as cluster:
        out = folder / "out"
        template = folder / "own.j2"
        job, log = submitted(cluster, *sft_config(folder, 6), "--output-dir", out, "--slurm", "--ckpt")
        state = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED"))
        check(state == "COMPLETED", f"the job is {state}:\n{read(log)}")
        check(sorted(harness.metrics(out)) == list(range(1, 7)), "not every step was recorded")
        # A template of the user's, and a job that fails.
        template.write_text("#!/bin/sh\n#SBATCH --job-name={{ job_name }} --output={{ log_file }}\necho partition {{ partition }}\nexit 3\n")
        job, log = submitted(cluster, *sft_config(folder, 6), "--output-dir", folder / "other", "--slurm.template-path", template)
        check(cluster.wait(job, ("COMPLETED", "FAILED")) == "FAILED", "a job that exits with 3 did not fail")
        check("partition cluster" in read(log), read(log))


def test_a_job_out_of_time_is_queued_again_and_goes_on():
    with harness.workspace("slurm-requeue") as folder, slurm_cluster.cluster(1) as cluster:
        out, steps = folder / "out", 4000
        job, log = submitted(cluster, *sft_config(folder, steps), "--output-dir", out, "--slurm", "--ckpt.interval", 100000)
        harness.wait_until(lambda: len(steps_of(out)) >= 5, 120, "the first steps")
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        harness.wait_until(lambda: "is queued again" in read(log), 120, "the job to notice")

        def has_resumed():
            return re.search(r"[Rr]esum\w+", read(log).split("is queued again")[-1]) is not None
        harness.wait_until(has_resumed, 180, f"the job to go on\n{read(log)}")
        check("from scratch" not in read(log), f"the job that ran out of time saved no checkpoint:\n{read(log)}")
        before = max(steps_of(out))
        harness.wait_until(lambda: max(steps_of(out)) > before, 120, "steps after the resume")
        done = steps_of(out)
        check(done == list(range(1, len(done) + 1)), f"steps are missing or doubled: {done}")
        cluster.run("scancel", job)
        check(cluster.wait(job, ("CANCELLED", "COMPLETED", "FAILED", "PENDING")) == "CANCELLED", "a cancelled job was queued again")


def test_reinforcement_learning_runs_as_a_job():
    with harness.workspace("slurm-rl") as folder, slurm_cluster.cluster(1) as cluster:
        out = folder / "out"
        config = harness.rl_config(folder / "rl.toml", harness.warm_model())
        job, log = submitted(cluster, "rl", "@", config, "--output-dir", out, "--compute.device", "cpu", "--max-steps", 4, "--slurm")
        state = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED"))
        check(state == "COMPLETED", f"the job is {state}:\n{read(log)}")
        check(max(harness.metrics(out)) == 4, "not every step was recorded")


ENDED = ("COMPLETED", "FAILED", "CANCELLED")
MULTI = ["--deployment.type", "multi_node", "--deployment.gpus-per-node", 1]


def test_reinforcement_learning_runs_on_four_nodes():
    with harness.workspace("slurm-nodes") as folder, slurm_cluster.cluster(4) as cluster:
        out = folder / "out"
        ports = harness.free_ports(2)
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0)
        steps = ["--compute.device", "cpu", "--max-steps", 6, "--ckpt"]
        prl("rl", "@", config, "--output-dir", folder / "one", *steps)
        job, log = submitted(cluster, "rl", "@", config, "--output-dir", out, *steps, *MULTI, "--deployment.num-infer-nodes", 2,
                             "--deployment.num-train-nodes", 2, "--inference.server.port", ports[0], "--slurm", env={"MASTER_PORT": str(ports[1])})
        state = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED"))
        check(state == "COMPLETED", f"the job is {state}:\n{read(log)}")
        check(harness.tensor_digest(out / "weights/step_6") == harness.tensor_digest(folder / "one/weights/step_6"),
              "four nodes gave other weights than one process")
        for path in ("latest/inference/node_1.log", "latest/trainer/node_1.log", "slurm/attempt_0/node_3.log"):
            check((out / "logs" / path).is_file(), f"no logs/{path}")


def test_fine_tuning_on_two_nodes_survives_a_killed_rank():
    with harness.workspace("slurm-sft-nodes") as folder, slurm_cluster.cluster(2) as cluster:
        out, steps = folder / "out", 800
        port = harness.free_ports(1)[0]
        prl(*sft_config(folder, steps), "--output-dir", folder / "one", "--ckpt")
        job, log = submitted(cluster, *sft_config(folder, steps), "--output-dir", out, *MULTI, "--deployment.num-nodes", 2, "--ckpt.interval", 400,
                             "--healing.backoff-seconds", 0.1, "--slurm", env={"MASTER_PORT": str(port)})
        harness.wait_until(lambda: len(steps_of(out)) >= 20 or cluster.state(job) in ENDED, 120, "the first steps")
        other = out / "logs/slurm/attempt_0/node_1.log"
        os.kill(harness.role_pids(other)["sft_rank_1"], signal.SIGKILL)
        harness.wait_until(lambda: "a rank was let in" in read(log) or cluster.state(job) in ENDED, 120, "the rank that was started again")
        check("1 of 3 losses" in read(other), read(other)[-3000:])
        state = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED"))
        check(state == "COMPLETED", f"the job is {state}:\n{read(log)[-4000:]}")
        check(harness.tensor_digest(out / f"weights/step_{steps}") == harness.tensor_digest(folder / f"one/weights/step_{steps}"),
              "other weights than a run that nobody disturbed")


def parent_of(pid):
    return int(re.search(r"^PPid:\s+(\d+)", read(f"/proc/{pid}/status"), re.M).group(1))


def test_a_job_that_lost_its_first_node_is_queued_again():
    with harness.workspace("slurm-lost-node") as folder, slurm_cluster.cluster(2) as cluster:
        out, steps = folder / "out", 400
        port = harness.free_ports(1)[0]
        prl(*sft_config(folder, steps), "--output-dir", folder / "one", "--ckpt")
        job, log = submitted(cluster, *sft_config(folder, steps), "--output-dir", out, *MULTI, "--deployment.num-nodes", 2, "--ckpt.interval", 20,
                             "--slurm", env={"MASTER_PORT": str(port)})
        harness.wait_until(lambda: (out / "checkpoints/step_20/trainer/manifest.json").exists() or cluster.state(job) in ENDED, 120,
                           "the first checkpoint")
        launcher = parent_of(harness.role_pids(log)["sft"])
        check(b"launch" in open(f"/proc/{launcher}/cmdline", "rb").read(), "not the launcher of node 0")
        os.kill(launcher, signal.SIGKILL)
        # Its ranks end with it. Those of the other node wait for them, and are not waited for.
        harness.wait_until(lambda: "is queued again" in read(log) or cluster.state(job) in ENDED, 150, "the job to notice")
        check("a step was killed (status 137)" in read(log), read(log)[-4000:])
        state = cluster.wait(job, ("COMPLETED", "FAILED", "CANCELLED"))
        check(state == "COMPLETED", f"the job is {state}:\n{read(log)[-4000:]}")
        check("resumed from" in read(log).split("is queued again")[-1], "the job began from scratch")
        check(harness.tensor_digest(out / f"weights/step_{steps}") == harness.tensor_digest(folder / f"one/weights/step_{steps}"),
              "other weights than a run that nobody disturbed")


harness.main(test_a_dry_run_writes_script_and_configuration, test_bad_values_are_named, test_fine_tuning_runs_as_a_job,
             test_a_job_out_of_time_is_queued_again_and_goes_on, test_reinforcement_learning_runs_as_a_job,
             test_reinforcement_learning_runs_on_four_nodes, test_fine_tuning_on_two_nodes_survives_a_killed_rank,
             test_a_job_that_lost_its_first_node_is_queued_again)
