#!/usr/bin/env python3
"""Python workers that are killed, hang, block, raise, flood and lie: no rollout is lost or counted twice, the others go on, and the log says
what happened to which task. PRL_FAULT_ROUNDS=N repeats every fault N times (100 take some minutes)."""
import contextlib
import json
import os
import pathlib
import re
import signal
import time

import harness
from harness import check

NUM_RUN_FAULTS = 100
ROUNDS = int(os.environ.get("PRL_FAULT_ROUNDS", "1"))
# What the fake environment does, and the failure that its rollout must end with; None: none.
FAULTS = {
    "kill": "WorkerDied", "die": "WorkerDied", "garbage": "WorkerDied", "no_json": "WorkerDied", "oversize": "WorkerDied", "block:60": "",
    "hang": "TimeoutError", "raise": "FakeFailure", "raise_chain": "FakeFailure", "exit": "SystemExit", "nan": "", "self_cancel": "",
    "huge:10000000": None, "huge_call:10000000": "", "stdout:1000000": None, "stderr:1000000": None, "log:2000": None, "surrogate": None, "double": None,
    "stray_call": None, "unknown_type": None, "forgotten_call": None, "many_calls:50": None, "fork:2000": "", "thread:2000": "", "files:100000": "", "memory:3000": "",
}
GOOD_BETWEEN = 2


def test_every_rollout_ends_once_whatever_workers_do():
    with harness.workspace("python-faults") as folder:
        model = harness.tiny_model(folder / "model")
        plan = [fault for _ in range(ROUNDS) for fault in FAULTS]
        step = GOOD_BETWEEN + 1
        args = {"num_eval": step * len(plan), "misbehave": {str(step * place): fault for place, fault in enumerate(plan)}}
        (folder / "eval.toml").write_text(f"""
num_examples = -1
max_concurrent = 12
[model]
name = "{model}"
[sampling]
max_completion_tokens = 4
[retry]
reraise = false
[save.disk]
path = "{folder}/saved"
[[env]]
id = "words"
kind = "fake"
num_workers = 3
timeout = 60
max_retries = 0
args = {{ num_eval = {args["num_eval"]}, misbehave = {{ {", ".join(f'"{index}" = "{fault}"' for index, fault in args["misbehave"].items())} }} }}
limits = {{ memory_gb = 2.0, processes = 256, files = 4096 }}
""")
        began = time.monotonic()
        _, said = harness.prl("eval", "@", folder / "eval.toml", "--output-dir", folder / "out", timeout=240 + 60 * ROUNDS)
        rows = harness.rows_of(folder / "saved/results.jsonl")
        check(sorted(row["example_id"] for row in rows) == list(range(args["num_eval"])), f"{len(rows)} rows for {args['num_eval']} tasks")
        by_fault = {}
        for row in rows:
            error = row["error"]["error"] if row["error"] else None
            fault = args["misbehave"].get(str(row["example_id"]))
            if fault is None:
                check(error is None, f"task {row['example_id']}, which does nothing wrong: {row['error']}")
                continue
            by_fault.setdefault(fault, set()).add(error)
            wanted = FAULTS[fault]
            if wanted == "":  # whether the kernel's limit or the library stops it is the machine's affair; it ends
                continue
            check(error == wanted, f"{fault}: {row['error']}, wanted {wanted}")
        check(re.search(r"words.*not tried again", said), "the log names environment and task")
        deaths = len(re.findall(r"worker \d+[^\n]*(died|killed|replaced)", said))
        print(f"      {len(rows)} rollouts, {len(plan)} faults, {deaths} lines about workers that died, {time.monotonic() - began:.0f} s: "
              f"{ {fault: sorted(map(str, errors)) for fault, errors in by_fault.items() if FAULTS[fault] == ''} }")


def test_a_worker_has_its_processor_time_and_no_more():
    with harness.workspace("python-cpu") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "eval.toml").write_text(f"""
num_examples = -1
[model]
name = "{model}"
[sampling]
max_completion_tokens = 4
[retry]
reraise = false
[save.disk]
path = "{folder}/saved"
[[env]]
id = "words"
kind = "fake"
num_workers = 1
max_retries = 0
args = {{ num_eval = 5, misbehave = {{ 2 = "cpu:100000" }} }}
limits = {{ cpu_seconds = 3, rollouts = 1 }}
""")
        _, said = harness.prl("eval", "@", folder / "eval.toml", "--output-dir", folder / "out", timeout=300)
        errors = {row["example_id"]: row["error"] and row["error"]["error"] for row in harness.rows_of(folder / "saved/results.jsonl")}
        check(errors == {0: None, 1: None, 2: "WorkerDied", 3: None, 4: None}, f"{errors}")
        check(said.count("has used up its processor time (limits.cpu_seconds)") == 2, said[-3000:])


def write_run(path, model, env, batch_size, max_steps, top="", orchestrator="", train=""):
    """A configuration of `prl rl` with the fake environment; the last three are further lines of these sections."""
    lines = "\n".join(env)
    path.write_text(f"""
max_steps = {max_steps}
seq_len = 256
{top}
[model]
name = "{model}"
[orchestrator]
batch_size = {batch_size}
group_size = 2
{orchestrator}
[orchestrator.train]
{train}
[orchestrator.train.sampling]
max_completion_tokens = 4
[[orchestrator.train.env]]
id = "words"
kind = "fake"
curriculum = {{}}
{lines}
[inference]
max_num_seqs = {batch_size}
[inference.model]
max_model_len = 256
""")


def test_a_run_with_a_hundred_faults_is_the_run_without():
    """Workers that are killed, exit, break the protocol or block, each for a task once, while a run trains in lock-step: the same rollouts, with the
    same tokens and rewards, and the same losses as without."""
    kinds = ["kill"] * 8 + ["die", "garbage"]
    with harness.workspace("python-run-faults") as folder:
        model = harness.tiny_model(folder / "model")
        (folder / "once").mkdir()
        # Every second task of 20 to a batch; two of the first batch block their workers, which is found out by pings that nobody answers.
        misbehave = {index: kinds[index // 2 % len(kinds)] for index in range(0, 2 * NUM_RUN_FAULTS, 2)} | {0: "block:300", 2: "block:300"}
        seen = {}
        for name, what in (("calm", {}), ("faulty", misbehave)):
            args = f'num_train = {2 * NUM_RUN_FAULTS}, once = "{folder}/once", misbehave = {{ {", ".join(f"{index} = {json.dumps(kind)}" for index, kind in what.items())} }}'
            write_run(folder / f"{name}.toml", model, ["num_workers = 6", "limits = { rollouts = 1 }", f"args = {{ {args} }}"], batch_size=40,
                      max_steps=2 * NUM_RUN_FAULTS // 20, top="seed = 3", orchestrator="max_async_level = 0\ndeterministic = true")
            began = time.monotonic()
            _, said = harness.prl("rl", "@", folder / f"{name}.toml", "--output-dir", folder / name)
            took = time.monotonic() - began
            rows = [row for path in sorted((folder / name).rglob("train_rollouts.jsonl")) for row in harness.rows_of(path)]
            losses = [row["loss/mean"] for _, row in sorted(harness.metrics(folder / name).items()) if "loss/mean" in row]
            seen[name] = (sorted((row["trajectory_id"], json.dumps(row["completion"]), row["reward"]) for row in rows), losses)
            ids = [row["trajectory_id"] for row in rows]
            check(len(ids) == len(set(ids)) == 4 * NUM_RUN_FAULTS, f"{name}: {len(ids)} rollouts, {len(set(ids))} of them different")
            check(not any(row["error"] for row in rows), f"{name}: {[row['error'] for row in rows if row['error']]}")
            deaths = len(re.findall(r"words: worker \d+ [^\n]*", said))
            print(f"      {name}: {len(rows)} rollouts, {len(what)} faults, {deaths} lines about workers, {took:.0f} s")
        check(len(list((folder / "once").iterdir())) == NUM_RUN_FAULTS, f"{len(list((folder / 'once').iterdir()))} tasks misbehaved")
        check(seen["calm"][1] == seen["faulty"][1] and len(seen["calm"][1]) == 2 * NUM_RUN_FAULTS // 20, f"losses {seen['calm'][1]} and {seen['faulty'][1]}")
        check(seen["calm"][0] == seen["faulty"][0], f"{[pair for pair in zip(seen['calm'][0], seen['faulty'][0]) if pair[0] != pair[1]][:3]}")
        check("pings" in said, "the blocked workers were found out")


def test_a_run_goes_on_without_the_rollouts_that_fail():
    """Rollouts that hang, raise, answer with what is no number or too large: they end once, with their reason, and others fill the batches."""
    faults = ["hang", "raise", "exit", "nan", "huge:10000000", "stdout:1000000", "kill"]
    with harness.workspace("python-run-failures") as folder:
        model = harness.tiny_model(folder / "model")
        misbehave = ", ".join(f"{3 * place} = {json.dumps(fault)}" for place, fault in enumerate(faults))
        write_run(folder / "rl.toml", model, ["num_workers = 2", "timeout = 4", "max_retries = 0",
                                              f"args = {{ num_train = 64, misbehave = {{ {misbehave} }} }}"],
                  batch_size=16, max_steps=3, train="filter_zero_advantages = false")
        harness.prl("rl", "@", folder / "rl.toml", "--output-dir", folder / "out")
        batches = {path.parent.name: harness.rows_of(path) for path in (folder / "out").rglob("train_rollouts.jsonl")}
        check({name: len(rows) for name, rows in batches.items()} == {f"step_{step}": 16 for step in (1, 2, 3)}, f"{ {name: len(rows) for name, rows in batches.items()} }")
        rows = [row for found in batches.values() for row in found]
        check(len({row["trajectory_id"] for row in rows}) == len(rows) and not any(row["error"] for row in rows), "each once, and none that failed")
        bad = {3 * place for place, fault in enumerate(faults) if not fault.startswith(("huge", "stdout"))}
        check(not bad & {row["example_id"] for row in rows}, f"{bad & {row['example_id'] for row in rows}}")


def processes_of(parent):
    """Names and ids of the children of a process, and of theirs, that are not dead."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text().rpartition(")")
            state, parent_pid = tail.split()[:2]
            if state != "Z":
                children.setdefault(int(parent_pid), []).append((int(head.split()[0]), head.partition("(")[2]))
    found, waiting = [], [parent]
    while waiting:
        for pid, name in children.get(waiting.pop(), []):
            found.append((name, pid))
            waiting.append(pid)
    return found


def is_alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_killed_templates_workers_and_the_program_itself():
    """A killed worker is replaced from the template, a killed template by a new one, and with the program all of them end."""
    with harness.workspace("python-templates") as folder:
        model = harness.tiny_model(folder / "model")
        # Two rollouts at a worker each, which never end, and a third that waits for a worker to die.
        write_run(folder / "rl.toml", model, ["num_workers = 2", "limits = { rollouts = 1 }", 'args = { num_train = 8, misbehave = { all = "hang" } }'],
                  batch_size=4, max_steps=1)
        with harness.running("rl", "@", folder / "rl.toml", "--output-dir", folder / "out", log=folder / "log") as program:
            def named(name, but=()):
                return sorted(pid for found, pid in processes_of(program.pid) if found == name and pid not in but)

            harness.wait_until(lambda: len(named("prl-worker")) == 2 and len(named("prl-template")) == 1, 60, "two workers of one template")
            workers, template = named("prl-worker"), named("prl-template")
            os.kill(workers[0], signal.SIGKILL)
            harness.wait_until(lambda: len(named("prl-worker", workers)) == 1, 30, "a worker in place of the killed one")
            check(named("prl-template") == template and is_alive(workers[1]), "the template and the other worker live on")
            os.kill(template[0], signal.SIGKILL)
            harness.wait_until(lambda: not is_alive(template[0]), 10, "the template's end")
            check(is_alive(workers[1]) and len(named("prl-worker")) == 2, "workers do not need their template")
            os.kill(workers[1], signal.SIGKILL)
            harness.wait_until(lambda: len(named("prl-worker", workers)) == 2 and named("prl-template"), 30, "a worker from a new template")
            everything = [pid for _, pid in processes_of(program.pid)]
            check(len(everything) >= 3, f"{processes_of(program.pid)}")
            program.kill()
            program.wait(30)
            harness.wait_until(lambda: not any(map(is_alive, everything)), 10, f"the end of {everything}")


def test_a_worker_of_another_protocol_is_refused():
    with harness.workspace("python-faults") as folder:
        model = harness.tiny_model(folder / "model")
        port = harness.free_port()
        # A peer that answers hello as another version would.
        script = folder / "peer.py"
        script.write_text(f"""
import json, socket, struct
listener = socket.create_server(("127.0.0.1", {port}))
print("listening", flush=True)
while True:
    peer, _ = listener.accept()
    size = struct.unpack("<I", peer.recv(4, socket.MSG_WAITALL))[0]
    peer.recv(size + 1, socket.MSG_WAITALL)
    body = json.dumps({{"t": "hello_ok", "protocol": 99, "worker_version": "9", "pid": 1, "python": "3.11", "packages": {{}}, "adapters": ["fake"], "capabilities": []}}).encode()
    peer.sendall(struct.pack("<I", len(body)) + b"J" + body)
""")
        import subprocess
        import sys

        peer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        try:
            peer.stdout.readline()
            _, said = harness.prl("eval", "--model.name", model, "--env.id", "words", "--env.kind", "fake", "--env.address", f"127.0.0.1:{port}",
                                  "--num-examples", 2, "--output-dir", folder / "out", expect=1)
        finally:
            peer.kill()
            peer.wait(10)
        check("prl-env/99" in said or "protocol 99" in said, said[-1500:])


if __name__ == "__main__":
    harness.main(test_a_worker_has_its_processor_time_and_no_more, test_every_rollout_ends_once_whatever_workers_do,
                 test_a_run_with_a_hundred_faults_is_the_run_without,
                 test_a_run_goes_on_without_the_rollouts_that_fail,
                 test_killed_templates_workers_and_the_program_itself,
                 test_a_worker_of_another_protocol_is_refused)
