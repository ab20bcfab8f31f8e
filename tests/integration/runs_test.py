#!/usr/bin/env python3
"""Several runs on one trainer and one server: who gets a slot, who leaves it, and that each run is what it would be alone."""
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import harness
from harness import check, prl

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/tests"))
import venvs

LORA = ["--model.lora.rank", 4, "--model.lora.alpha", 16, "--optim.lr", "2e-3"]


def orchestrator_config(path, name, port, **top):
    """The orchestrator of one run; `top` are top-level keys of simple types."""
    keys = {"seq_len": 256, "batch_size": 16, "group_size": 4, "max_async_level": 0, **top}
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in harness.ENV_ARGS.items())
    run = keys.pop("run", "weight = 1.0")
    rank, zmq, nccl = keys.pop("rank", 4), keys.pop("zmq", None), keys.pop("nccl", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()) + f"""
[student.model]
name = {json.dumps(str(harness.warm_model()))}
[student.model.lora]
name = {json.dumps(name)}
rank = {rank}
[student.client]
base_url = ["http://127.0.0.1:{port}/v1"]
[run]
{run}
[ckpt]
interval = 2
[rollout_transport]
type = "{"zmq" if zmq else "filesystem"}"
{f"port = {zmq}" if zmq else ""}
[weight_broadcast]
type = "{"nccl" if nccl else "filesystem"}"
{f"port = {nccl}" if nccl else ""}
[train.sampling]
max_completion_tokens = 48
[[train.env]]
id = "reverse-text"
args = {{ {args} }}
""")
    return path


@contextlib.contextmanager
def engine(folder, name="inference"):
    log, port = folder / f"{name}.log", harness.free_port()
    with harness.running("inference", "--model.name", harness.warm_model(), "--server.port", port, "--model.max-model-len", 256,
                         "--max-num-seqs", 32, "--enable-lora", log=log) as process:
        harness.wait_until(lambda: harness.is_healthy(port) or process.poll() is not None, 60, "the server")
        check(process.poll() is None, f"the server ended: {log.read_text()[-2000:]}")
        yield port, process


@contextlib.contextmanager
def server(folder):
    with engine(folder) as (port, _):
        yield port


def trainer(out, log, *flags, runs=2, env=None):
    return harness.running("trainer", "--model.name", harness.warm_model(), "--model.seq-len", 256, "--max-concurrent-runs", runs, *LORA,
                           "--output-dir", out, *flags, log=log, env=env)


def orchestrator(out, name, *flags, log=None):
    run = out / f"run_{name}"
    return harness.running("orchestrator", "@", run / "configs/orch.toml", "--output-dir", run, *flags, log=log or out / f"{name}.log")


def report(out):
    """Of runs.json, by name."""
    with contextlib.suppress(FileNotFoundError):
        return {run["name"]: run for run in json.loads((out / "runs.json").read_text())["runs"]}
    return {}


def has_state(out, name, state):
    return report(out).get(f"run_{name}", {}).get("state") == state


def step_of(out, name):
    return report(out).get(f"run_{name}", {}).get("step") or 0


def ends_well(process, what, seconds=120):
    harness.wait_until(lambda: process.poll() is not None, seconds, f"{what} to end")
    check(process.returncode == 0, f"{what} ended with {process.returncode}")


def saved(run, step):
    """Masters and optimizer of a run's checkpoint."""
    return harness.digest(run / f"checkpoints/step_{step}/trainer", "*.safetensors")


def alone(folder, name, steps, **top):
    """The same run by itself: one process with everything in it."""
    config = harness.rl_config(folder / f"{name}-alone.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
    out = folder / f"{name}-alone"
    rank = top.pop("rank", 4)
    flags = [word for key, value in top.items() for word in (f"--{key}", value)]
    prl("rl", "@", config, "--output-dir", out, "--trainer.model.lora.rank", rank, "--trainer.model.lora.alpha", 16, "--trainer.optim.lr",
        "2e-3", "--ckpt", "--ckpt.interval", 2, *flags)
    return saved(out, steps)


def rewards(run):
    rows = harness.metrics(run)
    return [rows[step]["reward/all/mean"] for step in sorted(rows) if "reward/all/mean" in rows[step]]


def reasons(out, name):
    """Why the run is not served; empty while nothing is said of it."""
    try:
        return (out / f"run_{name}/configs/error.txt").read_text()
    except FileNotFoundError:
        return ""


def gauges(port):
    with contextlib.suppress(OSError):
        return dict(line.rsplit(" ", 1) for line in harness.request(port, "GET", "/metrics")[1].splitlines() if not line.startswith("#"))
    return {}


def test_metrics_heartbeats_and_trackers_of_each_run():
    """Of two runs, one of which ends: one page of gauges and one heartbeat for both, and a run of wandb for each."""
    python = venvs.ready("trackers")
    with harness.workspace("runs-seen") as folder, harness.heartbeats() as (url, beats), server(folder) as port, contextlib.ExitStack() as stack:
        out, seen = folder / "out", harness.free_port()
        for name in ("alpha", "beta"):
            orchestrator_config(out / f"run_{name}/configs/orch.toml", name, port, max_steps=100_000 if name == "alpha" else 4)
        flags, env = ["--heartbeat.url", url, "--metrics-server.port", seen], {}
        if python:
            flags += ["--wandb", "--wandb.offline", "--wandb.project", "p", "--wandb.name", "shared"]
            env = {"PATH": f"{pathlib.Path(python).parent}:{os.environ['PATH']}"}
        else:
            print("wandb is not installed (python3 python/tests/venvs.py trackers): no run of it is looked at")
        process = stack.enter_context(trainer(out, folder / "trainer.log", *flags, env=env))
        harness.wait_until(lambda: {'trainer_step{run="run_alpha"}', 'trainer_step{run="run_beta"}'} <= gauges(seen).keys() or process.poll() is not None, 60,
                           "both runs in /metrics")
        check(process.poll() is None, (folder / "trainer.log").read_text()[-2000:])
        check(not beats, f"a heartbeat before a step: {beats}")
        stack.enter_context(orchestrator(out, "alpha", log=folder / "alpha.log"))
        beta = stack.enter_context(orchestrator(out, "beta", log=folder / "beta.log"))
        ends_well(beta, "beta")
        harness.wait_until(lambda: has_state(out, "beta", "ended"), 60, "beta to end")
        left = gauges(seen)
        check(not any("run_beta" in name for name in left), f"gauges of a run that has ended: {left}")
        shown = harness.wait_until(lambda: (lambda now: now if float(now.get('trainer_step{run="run_alpha"}', 0)) >= 2 else None)(gauges(seen)), 120, "steps of alpha")
        step = int(float(shown['trainer_step{run="run_alpha"}']))
        loss = harness.wait_until(lambda: next((row["loss/mean"] for row in harness.rows_of(out / "run_alpha/metrics.jsonl") if (row["role"], row["step"]) == ("trainer", step)), None),
                                  60, f"the trainer's row of step {step}")
        check(float(shown['trainer_loss{run="run_alpha"}']) == loss, f"{shown}")
        check(harness.request(seen, "GET", "/health") == (200, "ok\n"), "/health")
        harness.wait_until(lambda: len(beats) >= 2, 60, "heartbeats")
        check(set(beats) == {"/beat"}, f"{beats[:3]}")
        if python:
            harness.wait_until(lambda: (out / "run_alpha/trackers/trainer/wandb_id").exists(), 120, "the tracker of alpha")
        stopping(process)
        if python:
            check_wandb(python, out, ("alpha", "beta"))


def check_wandb(python, out, names):
    """Each run's folder has a run of wandb with the trainer's rows, each once."""
    read = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
from prl_tracker import wandb_run
print(json.dumps(sorted([row["prl/role"], row["step"]] for path in sorted(pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")) for row in wandb_run.history(path) if "prl/role" in row)))"""
    ids = set()
    for name in names:
        run = out / f"run_{name}"
        settings = json.loads((run / "trackers/trainer/wandb.json").read_text())
        check(settings["wandb"]["name"] == f"shared-run_{name}-trainer", f"{settings}")
        done = subprocess.run([python, "-c", read, run, pathlib.Path(__file__).resolve().parents[2] / "python"], capture_output=True, text=True, timeout=120)
        check(done.returncode == 0, done.stderr[-2000:])
        wanted = sorted(["trainer", row["step"]] for row in harness.rows_of(run / "metrics.jsonl") if row["role"] == "trainer")
        check(wanted and json.loads(done.stdout) == wanted, f"{name}: wandb has {done.stdout}, metrics.jsonl {wanted}")
        check((run / "trackers/trainer/final_summary.json").exists() and not (run / "final_summary.json").exists(), f"the summary of {name}")
        ids.add((run / "trackers/trainer/wandb_id").read_text())
    check(len(ids) == len(names), f"two runs share one of wandb: {ids}")


def test_three_runs_on_two_slots():
    with harness.workspace("runs") as folder:
        out = folder / "out"
        wanted_beta, wanted_gamma = alone(folder, "beta", 14), alone(folder, "gamma", 6, rank=8, seed=7)
        with server(folder) as port, contextlib.ExitStack() as stack:
            orchestrator_config(out / "run_alpha/configs/orch.toml", "alpha", port, max_steps=1000, seed=3)
            orchestrator_config(out / "run_beta/configs/orch.toml", "beta", port, max_steps=14)
            (out / "run_beta/configs/control.json").write_text('{"state": "pause"}')  # so that it does not end first
            bad = out / "run_bad/configs/orch.toml"
            orchestrator_config(bad, "bad", port, no_such_key=1)
            socket = harness.free_port()  # of gamma, and the next one
            first = stack.enter_context(trainer(out, folder / "trainer.log"))
            harness.wait_until(lambda: has_state(out, "beta", "paused"), 60, "the first slots")
            harness.wait_until(lambda: "no_such_key" in reasons(out, "bad"), 60, "error.txt to name the key")
            # A third finds no slot until one is free.
            orchestrator_config(out / "run_gamma/configs/orch.toml", "gamma", port, max_steps=6, rank=8, seed=7, zmq=socket,
                                run="weight = 2.5\nmax_tokens_in_flight = 4000")
            # It holds its port until it is resumed.
            (out / "run_gamma/configs/control.json").write_text('{"state": "pause"}')
            harness.wait_until(lambda: has_state(out, "gamma", "waiting"), 60, "the third to wait")
            alpha = stack.enter_context(orchestrator(out, "alpha", log=folder / "alpha.log"))
            beta = stack.enter_context(orchestrator(out, "beta", log=folder / "beta.log"))
            gamma = stack.enter_context(orchestrator(out, "gamma", log=folder / "gamma.log"))
            harness.wait_until(lambda: step_of(out, "alpha") >= 10, 120, "step 10 of alpha")
            slot = report(out)["run_alpha"]["slot"]
            alpha.kill()
            shutil.rmtree(out / "run_alpha", ignore_errors=True)
            harness.wait_until(lambda: report(out).get("run_gamma", {}).get("slot") == slot, 60, "the third to get the slot")
            orchestrator_config(bad, "bad", port, zmq=socket + 1)
            harness.wait_until(lambda: "rollout_transport.port" in reasons(out, "bad"), 60, "the port to be refused")
            check(has_state(out, "gamma", "paused") and step_of(out, "gamma") == 0, f"a paused run that got a slot was stepped: {report(out)}")
            for name in ("beta", "gamma"):
                prl("runs", "resume", name, "--output-dir", out)
            ends_well(beta, "beta")
            ends_well(gamma, "gamma")
            harness.wait_until(lambda: has_state(out, "beta", "ended") and has_state(out, "gamma", "ended"), 60, "both to end")
            check(not (out / "run_alpha").exists(), "the folder of a run that was taken away was made again")
            shares = {run["name"]: run for run in harness.request(port, "GET", "/runs")[1]["data"]}
            check(shares["beta"]["weight"] == 1 and shares["gamma"]["weight"] == 2.5 and shares["gamma"]["max_tokens_in_flight"] == 4000,
                  f"the server was not told the runs' shares: {shares}")
            check(all(shares[name]["num_generation_tokens"] > 0 and shares[name]["num_requests_running"] == 0 for name in ("beta", "gamma")), f"{shares}")
            # A configuration that was mended loses its error.
            orchestrator_config(bad, "bad", port, max_steps=2)
            harness.wait_until(lambda: has_state(out, "bad", "training"), 60, "the mended run")
            check(not (out / "run_bad/configs/error.txt").exists(), "error.txt of a run that is served")
            stopping(first)
        check(saved(out / "run_beta", 14) == wanted_beta, "beta is not what it is alone")
        check(saved(out / "run_gamma", 6) == wanted_gamma, "gamma is not what it is alone")
        for name in ("beta", "gamma"):
            proofs = harness.rows_of(out / f"run_{name}/logs/weight_proofs.jsonl")
            check(proofs and all(proof["is_proven"] for proof in proofs), f"{name}: {proofs}")
            check(all(row["mismatch_kl/all/mean"] == 0 for row in harness.metrics(out / f"run_{name}").values() if "mismatch_kl/all/mean" in row),
                  f"{name}: sampler and trainer differ")
        course = rewards(out / "run_beta")
        check(sum(course[-4:]) > sum(course[:4]), f"the reward of beta does not rise: {course}")


def test_the_engines_of_a_run_are_behind_a_router():
    """The adapter of each step is on all of them: also on one that joins late, and though one is killed."""
    with harness.workspace("runs-router") as folder:
        behind_a_router(folder)


def test_a_router_passes_on_where_adapters_are_in_memory():
    with harness.workspace("runs-router-memory") as folder:
        broadcast = harness.free_port()
        behind_a_router(folder, "--weight-broadcast.type", "nccl", "--weight-broadcast.port", broadcast, nccl=broadcast)
        check(f"from tcp://127.0.0.1:{broadcast}" in (folder / "late.log").read_text(), "the late engine did not ask the trainer")


def behind_a_router(folder, *flags, **top):
    out, steps = folder / "out", 10
    wanted = alone(folder, "one", steps)
    with contextlib.ExitStack() as stack:
        (first, _), (second, killed) = (stack.enter_context(engine(folder, name)) for name in ("first", "second"))
        port = harness.free_port()
        stack.enter_context(harness.running("router", "--engines", f"http://127.0.0.1:{first},http://127.0.0.1:{second}", "--port", port,
                                            "--output-dir", folder / "router", log=folder / "router.log"))

        def states():
            with contextlib.suppress(OSError):
                return {int(e["url"].rsplit(":", 1)[1]): e["state"] for e in harness.request(port, "GET", "/engines")[1]["engines"]}
            return {}
        harness.wait_until(lambda: list(states().values()) == ["ready"] * 2, 60, "the router's engines")
        orchestrator_config(out / "run_one/configs/orch.toml", "one", port, max_steps=steps, run="weight = 2.0", **top)
        role = stack.enter_context(orchestrator(out, "one", log=folder / "one.log"))
        learning = stack.enter_context(trainer(out, folder / "trainer.log", *flags))
        harness.wait_until(lambda: step_of(out, "one") >= 2 or role.poll() is not None, 120, "step 2")
        check(role.poll() is None, f"the run ended early: {(folder / 'one.log').read_text()[-2000:]}")
        killed.kill()
        late, _ = stack.enter_context(engine(folder, "late"))
        check(harness.request(port, "POST", "/engines", {"url": f"http://127.0.0.1:{late}"})[0] == 201, "the late engine could not join")
        ends_well(role, "the run")
        harness.wait_until(lambda: has_state(out, "one", "ended"), 60, "the trainer to end the run")
        harness.wait_until(lambda: states().get(late) == "ready" and states().get(second) == "down", 60, "one to be ready and one to be missed")

        def proofs():
            return [harness.request(each, "GET", "/weight_proof?adapter=one")[1] for each in (port, first, late)]
        # Of step 9's policy the last batch is sampled. Step 10's, of which none is, comes to the engines or not: the run may have ended by then,
        # while an order that it gave is still carried out.
        harness.wait_until(lambda: len({json.dumps(proof, sort_keys=True) for proof in proofs()}) == 1, 30, "all engines to have one adapter")
        proof = proofs()[0]
        check(proof["policy_version"] in (steps - 1, steps), f"{proof}")
        for each in (first, late):
            runs = harness.request(each, "GET", "/runs")[1]["data"]
            check([(run["name"], run["weight"]) for run in runs] == [("one", 2)], f"an engine was not told of the run: {runs}")
        counted = harness.request(port, "GET", "/runs")[1]["data"][0]["num_generation_tokens"]
        check(counted >= sum(harness.request(each, "GET", "/runs")[1]["data"][0]["num_generation_tokens"] for each in (first, late)) > 0, "no tokens")
        status, reply = harness.request(port, "POST", "/load_lora_adapter", {"lora_name": "two", "lora_path": str(folder / "nowhere")})
        check(status == 404 and all(f":{each}" in json.dumps(reply) for each in (first, late)), f"{status} {reply}")
        stopping(learning)
    check(saved(out / "run_one", steps) == wanted, "the run is not what it is alone")
    proofs = harness.rows_of(out / "run_one/logs/weight_proofs.jsonl")
    check(proofs and all(row["is_proven"] for row in proofs), f"{proofs}")


def stopping(process):
    process.send_signal(signal.SIGTERM)
    harness.wait_until(lambda: process.poll() is not None, 60, "the trainer to stop")
    check(process.returncode in (0, 130), f"the trainer ended with {process.returncode}")


def test_what_several_runs_do_not_have_is_refused_by_its_key():
    with harness.workspace("runs-refused") as folder:
        for command, flags, words in (
                ("rl", ["--model.name", harness.warm_model(), "--inference", "--trainer.model.lora", "--trainer.max-concurrent-runs", 2,
                        "--orchestrator.batch-size", 8], ("orchestrator", "prl runs add")),
                ("rl", ["--model.name", harness.warm_model(), "--inference", "--orchestrator.train.env", '[{"id": "reverse-text"}]', "--runs", '["one.toml"]'],
                 ("runs", "max_concurrent_runs")),
                ("trainer", ["--model.name", harness.warm_model(), "--max-concurrent-runs", 2], ("max_concurrent_runs", "model.lora")),
                ("trainer", ["--model.name", harness.warm_model(), "--max-concurrent-runs", 2, "--model.lora", "--wandb.id", "x"],
                 ("wandb.id", "each of several runs has one of its own"))):
            _, stderr = prl(command, *flags, "--output-dir", folder / "out", expect=1)
            check(all(word in stderr for word in words), f"{command}: {stderr[-1000:]}")


def adapter(run, step):
    """The bits of the trained adapter, whoever wrote it in how many files."""
    return harness.tensor_digest(run / f"weights/step_{step}/lora_adapters")


def test_three_trainer_ranks_give_each_run_the_bits_of_one():
    """Also when one of the runs is taken away, and when all ranks are stopped and started again as two."""
    with harness.workspace("runs-ranks") as folder:
        out, steps = folder / "out", 16
        saves = ["--ckpt", "--ckpt.weights.save-adapter-separately"]
        wanted = {}
        for name, seed in (("one", 1), ("two", 5)):
            alone(folder, name, steps, seed=seed, **{"trainer.ckpt.weights.save-adapter-separately": "true"})
            wanted[name] = adapter(folder / f"{name}-alone", steps)

        def ranks(count, log):
            return harness.running("launch", "--nproc-per-node", count, "trainer", "--model.name", harness.warm_model(), "--model.seq-len", 256,
                                   "--max-concurrent-runs", 3, *LORA, "--output-dir", out, *saves, log=log)

        with server(folder) as port, contextlib.ExitStack() as stack:
            for name, seed in (("one", 1), ("two", 5)):
                orchestrator_config(out / f"run_{name}/configs/orch.toml", name, port, max_steps=steps, seed=seed)
            orchestrator_config(out / "run_gone/configs/orch.toml", "gone", port, max_steps=1000)
            with ranks(3, folder / "trainer.log") as process:
                roles = {name: stack.enter_context(orchestrator(out, name, log=folder / f"{name}.log")) for name in ("one", "two", "gone")}
                harness.wait_until(lambda: step_of(out, "gone") >= 1 or process.poll() is not None, 120, "a step of the third run")
                roles["gone"].kill()
                shutil.rmtree(out / "run_gone", ignore_errors=True)
                harness.wait_until(lambda: "run_gone" not in report(out) or process.poll() is not None, 60, "the third run to leave its slot")
                harness.wait_until(lambda: min(step_of(out, name) for name in wanted) >= 3 or process.poll() is not None, 120, "step 3 of both")
                check(process.poll() is None, f"the ranks ended: {(folder / 'trainer.log').read_text()[-3000:]}")
                process.send_signal(signal.SIGTERM)
                harness.wait_until(lambda: process.poll() is not None, 60, "the ranks to stop")
            check("rank 2 of 3" in (out / "logs/latest/trainer/rank_2.log").read_text(), "rank 2 has no log")
            stack.enter_context(ranks(2, folder / "again.log"))
            for name in wanted:
                ends_well(roles[name], name)
            harness.wait_until(lambda: all(has_state(out, name, "ended") for name in wanted), 60, "both to end")
        for name, bits in wanted.items():
            check(adapter(out / f"run_{name}", steps) == bits, f"{name} has other bits than alone on one rank")
            check(all(row["mismatch_kl/all/mean"] == 0 for row in harness.metrics(out / f"run_{name}").values() if "mismatch_kl/all/mean" in row),
                  f"{name}: sampler and trainer differ")


def test_one_launch_serves_runs_that_come_and_goes_on_after_kills():
    """`prl rl` with two runs, of which one is added later: a trainer and an orchestrator that are killed change no bit of either."""
    with harness.workspace("runs-launched") as folder:
        out, port, log = folder / "out", harness.free_port(), folder / "rl.log"
        wanted = {"one": alone(folder, "one", 16), "two": alone(folder, "two", 16, seed=5)}
        one = orchestrator_config(folder / "one.toml", "one", 1, max_steps=16)  # the port of the engines is the launch's
        two = orchestrator_config(folder / "two.toml", "two", 1, max_steps=16, seed=5, zmq=harness.free_port())
        flags = ["--model.name", harness.warm_model(), "--seq-len", 256, "--runs", json.dumps([str(one)]), "--trainer.max-concurrent-runs", 2,
                 "--trainer.model.lora.rank", 4, "--trainer.model.lora.alpha", 16, "--trainer.optim.lr", "2e-3", "--inference.server.port", port,
                 "--inference.max-num-seqs", 32, "--inference.model.max-model-len", 256, "--output-dir", out]
        with harness.running("rl", *flags, log=log) as launch:
            harness.wait_until(lambda: "trainer" in harness.role_pids(log) or launch.poll() is not None, 60, "the roles")
            check(launch.poll() is None, log.read_text()[-2000:])
            added = prl("runs", "add", "two", "--config", two, "--output-dir", out)[0]
            check("run_two" in added, added)
            pids = harness.role_pids(log)
            # A step takes a tenth of a second: the runs must not be over before this looks again.
            with harness.slowed(pids["trainer"], running=0.02, stopped=0.2):
                harness.wait_until(lambda: min(step_of(out, name) for name in wanted) >= 3 or launch.poll() is not None, 120, "step 3 of both")
                check(launch.poll() is None, log.read_text()[-2000:])
                os.kill(harness.role_pids(log)["run_two"], signal.SIGKILL)
                os.kill(pids["trainer"], signal.SIGKILL)
            harness.wait_until(lambda: all(has_state(out, name, "ended") for name in wanted) or launch.poll() is not None, 120, "both to end")
            check(launch.poll() is None, log.read_text()[-2000:])
            # What has ended stays so, until somebody wants more of it.
            told = log.read_text()
            check(told.count("run_one begins") == 1 and told.count("it is started again") == 1 and told.count("run_two goes on from its last checkpoint") == 1, told[-3000:])
            stopping(launch)
        for name in wanted:
            check(saved(out / f"run_{name}", 16) == wanted[name], f"{name} is not what it is without kills")
        (out / "run_two/configs/orch.toml").unlink()  # as if its orchestrator had been started by hand
        with harness.running("rl", *flags, log=folder / "again.log") as launch:
            prl("runs", "add", "three", "--config", orchestrator_config(folder / "three.toml", "three", port, max_steps=1), "--output-dir", out)
            harness.wait_until(lambda: has_state(out, "three", "ended") or launch.poll() is not None, 120, "another run")
            check(has_state(out, "three", "ended"), (folder / "again.log").read_text()[-2000:])
            check("run_one" not in harness.role_pids(folder / "again.log"), "a run that had ended was begun again")
            stopping(launch)


def test_adapters_of_all_runs_come_from_the_trainers_memory():
    """Two runs, one address. The trainer is killed and started again."""
    with harness.workspace("runs-memory") as folder:
        out, broadcast = folder / "out", harness.free_port()
        wanted = {"one": alone(folder, "one", 16), "two": alone(folder, "two", 16, seed=5)}
        over = ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", broadcast]
        with server(folder) as port, contextlib.ExitStack() as stack:
            orchestrator_config(out / "run_one/configs/orch.toml", "one", port, max_steps=16, nccl=broadcast)
            orchestrator_config(out / "run_two/configs/orch.toml", "two", port, max_steps=16, seed=5, nccl=broadcast)
            bad = out / "run_bad/configs/orch.toml"
            orchestrator_config(bad, "bad", port, nccl=broadcast + 1)
            roles = [stack.enter_context(orchestrator(out, name, log=folder / f"{name}.log")) for name in wanted]
            with trainer(out, folder / "trainer.log", *over) as process:
                # A step takes a tenth of a second: the runs must not be over before this looks again.
                with harness.slowed(process.pid, running=0.02, stopped=0.2):
                    harness.wait_until(lambda: process.poll() is not None or min(step_of(out, name) for name in wanted) >= 3, 120, "step 3 of both")
                    check(process.poll() is None, f"the trainer ended: {(folder / 'trainer.log').read_text()[-2000:]}")
                    process.kill()
                process.wait(10)
            check("weight_broadcast.port" in reasons(out, "bad"), f"another port than the trainer's is not refused: {reasons(out, 'bad')}")
            orchestrator_config(bad, "bad", port)
            again = stack.enter_context(trainer(out, folder / "again.log", *over))
            for role, name in zip(roles, wanted):
                ends_well(role, name)
            harness.wait_until(lambda: all(has_state(out, name, "ended") for name in wanted), 60, "both to end")
            harness.wait_until(lambda: "weight_broadcast.type" in reasons(out, "bad"), 60, "files to be refused")
            log = (folder / "inference.log").read_text()
            check(all(f"LoRA adapter '{name}' v" in log for name in wanted) and f"from tcp://127.0.0.1:{broadcast}" in log, log[-1500:])
            stopping(again)
        for name in wanted:
            run = out / f"run_{name}"
            check(saved(run, 16) == wanted[name], f"{name} is not what it is alone")
            announced = {path.name for path in (run / "broadcasts").rglob("*") if path.is_file()}
            check(announced == {"STABLE", "manifest.json"}, f"{name}: {announced}")
            proofs = harness.rows_of(run / "logs/weight_proofs.jsonl")
            check(proofs and all(proof["is_proven"] for proof in proofs), f"{name}: {proofs}")
            check(all(row["mismatch_kl/all/mean"] == 0 for row in harness.metrics(run).values() if "mismatch_kl/all/mean" in row),
                  f"{name}: sampler and trainer differ")


def test_runs_are_listed_paused_drained_and_removed():
    with harness.workspace("runs-control") as folder:
        out = folder / "out"

        def runs(*words, **how):
            return prl("runs", *words, "--output-dir", out, **how)[0]

        with server(folder) as port, contextlib.ExitStack() as stack:
            stack.enter_context(trainer(out, folder / "trainer.log"))
            harness.wait_until(lambda: (out / "runs.json").exists(), 60, "the trainer")
            for name in ("one", "two"):
                runs("add", name, "--config", orchestrator_config(folder / f"{name}.toml", name, port, max_steps=1000))
            check("already" in prl("runs", "add", "one", "--config", folder / "one.toml", "--output-dir", out, expect=1)[1], "added twice")
            check("run_two" in prl("runs", "pause", "three", "--output-dir", out, expect=1)[1], "an unknown run does not name those there are")
            one, two = (stack.enter_context(orchestrator(out, name, log=folder / f"{name}.log")) for name in ("one", "two"))
            harness.wait_until(lambda: min(step_of(out, name) for name in ("one", "two")) >= 1, 120, "the first steps")
            runs("pause", "one")
            harness.wait_until(lambda: has_state(out, "one", "paused"), 60, "a pause")
            stands_at, passes = step_of(out, "one"), step_of(out, "two") + 3
            harness.wait_until(lambda: step_of(out, "two") >= passes, 120, "the other to go on")
            check(step_of(out, "one") == stands_at, "a paused run was stepped")
            check("paused" in runs("list") and "run_two" in runs("list"), runs("list"))
            runs("resume", "one", "--weight", 2)
            harness.wait_until(lambda: step_of(out, "one") > stands_at and report(out)["run_one"]["weight"] == 2, 120, "it to go on")
            runs("drain", "one")
            ends_well(one, "the orchestrator of a drained run")
            harness.wait_until(lambda: has_state(out, "one", "ended"), 60, "the drained run to leave its slot")
            last = max(int(path.name[5:]) for path in (out / "run_one/checkpoints").glob("step_*"))
            check({path.name for path in (out / f"run_one/checkpoints/step_{last}").iterdir()} == {"trainer", "orchestrator"},
                  f"step {last} of the drained run is not whole")
            runs("remove", "two")
            harness.wait_until(lambda: "run_two" not in report(out), 60, "the removed run to leave its slot")
            harness.wait_until(lambda: two.poll() is not None, 60, "its orchestrator to end")
            check(not (out / "run_two/configs").exists(), "a removed run is there again")


if __name__ == "__main__":
    harness.main(test_three_runs_on_two_slots, test_metrics_heartbeats_and_trackers_of_each_run, test_three_trainer_ranks_give_each_run_the_bits_of_one, test_what_several_runs_do_not_have_is_refused_by_its_key,
                 test_one_launch_serves_runs_that_come_and_goes_on_after_kills, test_adapters_of_all_runs_come_from_the_trainers_memory,
                 test_the_engines_of_a_run_are_behind_a_router, test_a_router_passes_on_where_adapters_are_in_memory, test_runs_are_listed_paused_drained_and_removed)
