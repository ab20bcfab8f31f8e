#!/usr/bin/env python3
"""Python workers that are killed, hang, block, raise, flood and lie: no rollout is lost or counted twice, the others go on, and the log says
what happened to which task. PRL_FAULT_ROUNDS=N repeats every fault N times (100 take some minutes)."""
import json
import os
import re
import time

import harness
from harness import check

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
timeout = 25
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
    harness.main(test_every_rollout_ends_once_whatever_workers_do, test_a_worker_of_another_protocol_is_refused)
