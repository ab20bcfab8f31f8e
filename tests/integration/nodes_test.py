#!/usr/bin/env python3
"""Runs over several nodes, each an address of its own of this machine: `prl launch rl`, `sft` and `inference` with deployment.type =
"multi_node". The weights are those of one process."""
import contextlib
import json
import os
import re
import signal

import harness
from harness import check, prl

STEPS = 6
HOSTS = [f"127.0.0.{11 + node}" for node in range(4)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def weights(out, step=STEPS):
    return harness.tensor_digest(out / f"weights/step_{step}")


@contextlib.contextmanager
def nodes(folder, count, *command, env=None):
    """`prl launch` of every node; their processes and logs, node 0 first. Which node one is comes from the environment."""
    meet = f"{HOSTS[0]}:{harness.free_port()}"
    with contextlib.ExitStack() as stack:
        agents = []
        for node in range(count):
            log = folder / f"node_{node}.log"
            own = {"PRL_NODE_RANK": str(node), "PRL_RDZV_ENDPOINT": meet, "PRL_NODE_HOST": HOSTS[node], **(env or {})}
            agents.append((stack.enter_context(harness.running("launch", *command, env=own, log=log)), log))
        yield agents


def finish(agents, seconds=180):
    for node, (agent, log) in enumerate(agents):
        check(agent.wait(seconds) == 0, f"node {node}: {log.read_text()[-3000:]}")


def rl(folder, out, *flags):
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=STEPS)
    return ["rl", "@", config, "--output-dir", out, "--ckpt", *flags]


MULTI = ["--deployment.type", "multi_node", "--deployment.gpus-per-node", 1, "--deployment.num-infer-nodes", 2, "--deployment.num-train-nodes", 2]


def test_rl_on_two_inference_and_two_trainer_nodes_gives_the_weights_of_one_process():
    with harness.workspace("rl-nodes") as folder:
        prl(*rl(folder, folder / "one"))
        # Groups of one node: each trainer node has a whole copy of the state.
        traced = ["--trainer.trace-path", folder / "trace", "--deployment.nodes-per-fsdp-group", 1]
        for name, flags in (("files", traced), ("wire", ["--rollout-transport.type", "zmq", "--weight-broadcast.type", "nccl",
                                                     "--deployment.orchestrator-on-inference"])):
            out = folder / name
            ports = harness.free_ports(3)
            if name == "wire":
                flags += ["--rollout-transport.port", ports[1], "--weight-broadcast.port", ports[2], "--weight-broadcast.num-senders", 2]
            with nodes(folder, 4, *rl(folder, out, *MULTI, "--inference.server.port", ports[0], *flags)) as agents:
                finish(agents)
            check(weights(out) == weights(folder / "one"), f"{name}: other weights")
            if name == "files":
                events = json.loads((folder / "trace/trace.json").read_text())["traceEvents"]
                names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
                check(len(names) == 5, f"the trace has {names}, wanted two engines, two trainer ranks and the orchestrator")
                check("dp_replicate = 2" in (out / "configs/trainer.toml").read_text(), "not two copies of the state")
            logs = out / "logs/latest"
            for path in ("inference/node_0.log", "inference/node_1.log", "trainer/node_0.log", "trainer/node_1.log", "orchestrator.log"):
                check((logs / path).is_file(), f"no {path}")
            sends = "2 ranks send engines a part of the weights each" in (logs / "trainer.log").read_text()
            check(sends == (name == "wire"), "both trainer nodes send a part over the wire, and over files none does")
            check("rank 1 of 2" in (logs / "trainer/node_1.log").read_text(), "the second trainer node is no rank")
            check((logs / "trainer.log").resolve() == (logs / "trainer/node_0.log").resolve(), "trainer.log is no link to the first node's")
            config = (out / "configs/orchestrator.toml").read_text()
            for host in HOSTS[:2]:
                check(f"http://{host}:{ports[0]}/v1" in config, f"the orchestrator does not know {host}: {config}")
            check(harness.check_rows(out)["trainer"] == STEPS, "rows")
            check(f"Step {STEPS}/{STEPS}" in (folder / "node_0.log").read_text(), "node 0 shows no steps")


def test_a_failure_on_one_node_ends_the_run_on_all():
    with harness.workspace("rl-nodes-failure") as folder:
        out = folder / "out"
        ports = harness.free_ports(1)
        command = rl(folder, out, *MULTI, "--inference.server.port", ports[0], "--max-steps", 100000)
        with nodes(folder, 4, *command) as agents:
            harness.wait_until(lambda: (out / "metrics.jsonl").exists() or agents[0][0].poll() is not None, 120, "the first step")
            pid = harness.wait_until(lambda: next((pids["trainer_rank_1"] for _, log in agents for pids in [harness.role_pids(log)] if "trainer_rank_1" in pids), None),
                                     60, "the second rank")
            os.kill(pid, signal.SIGKILL)
            for node, (agent, log) in enumerate(agents):
                check(agent.wait(270) == 1, f"node {node} ended well: {log.read_text()[-2000:]}")
        texts = [(folder / f"node_{node}.log").read_text() for node in range(4)]
        check(any("trainer_rank_1 was killed by signal 9" in text for text in texts), texts[3][-3000:])
        check("node " in texts[0] and "ERROR" in texts[0], texts[0][-2000:])


def test_what_dies_on_any_node_is_healed_and_costs_no_bit():
    """An engine, both trainer ranks and the orchestrator, each on a node of its own, one after the other; all that they send goes over the network."""
    with harness.workspace("nodes-healing") as folder:
        steps, out, ports = 24, folder / "out", harness.free_ports(3)
        prl(*rl(folder, folder / "one", "--max-steps", steps))
        flags = ["--rollout-transport.type", "zmq", "--rollout-transport.port", ports[1], "--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[2],
                 "--weight-broadcast.num-senders", 2, "--deployment.orchestrator-on-inference", "--trainer.healing", "--max-steps", steps]
        with nodes(folder, 4, *rl(folder, out, *MULTI, "--inference.server.port", ports[0], *flags)) as agents:
            for step, victim in ((3, "inference_1"), (7, "trainer_rank_1"), (11, "orchestrator"), (15, "trainer")):
                harness.wait_until(lambda: any(int(path.name[5:]) >= step for path in (out / "broadcasts").glob("step_*") if path.name[5:].isdigit())
                                   or any(agent.poll() is not None for agent, _ in agents), 120, f"version {step}")
                os.kill(next(pids[victim] for _, log in agents for pids in [harness.role_pids(log)] if victim in pids), signal.SIGKILL)
            finish(agents)
        check(weights(out, steps) == weights(folder / "one", steps), "other weights than a run that was left alone")
        text = "".join((folder / f"node_{node}.log").read_text() for node in range(4))
        for victim in ("inference_1", "trainer_rank_1", "orchestrator", "trainer"):
            check(f"{victim} was killed by signal 9" in text, f"{victim} was not killed: {text[-3000:]}")


def test_sft_takes_its_nodes_from_the_deployment():
    with harness.workspace("sft-nodes") as folder:
        harness.tiny_model(folder / "model")
        harness.sft_data(folder / "data.jsonl", 64)
        sft = ["sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 5,
               "--max-steps", STEPS, "--ckpt", "--output-dir"]
        prl(*sft, folder / "one")
        multi = ["--deployment.type", "multi_node", "--deployment.num-nodes", 2, "--deployment.gpus-per-node", 2]
        with nodes(folder, 2, *sft, folder / "two", *multi) as agents:
            finish(agents)
        check(weights(folder / "two") == weights(folder / "one"), "two nodes gave other weights")
        _, answer = prl(*sft, folder / "three", *multi, expect=1)
        check("on each of them start `prl launch" in answer, answer)
        _, answer = prl("launch", *sft, folder / "three", *multi, expect=1)
        check("which of the 2 nodes is this?" in answer, answer)


def test_a_node_that_loses_the_first_one_ends():
    """With the first node's launcher goes the store in which ranks say whom they lost: nobody waits for it."""
    with harness.workspace("lost-first-node") as folder:
        harness.tiny_model(folder / "model")
        harness.sft_data(folder / "data.jsonl", 64)
        sft = ["sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
               "--max-steps", 1000000, "--deployment.type", "multi_node", "--deployment.gpus-per-node", 1, "--deployment.num-nodes", 2, "--output-dir", folder / "out"]
        with nodes(folder, 2, *sft) as [(first, log), (second, of_second)]:
            harness.wait_until(lambda: "Step 20/" in log.read_text() or first.poll() is not None, 120, "the first steps")
            rank = harness.role_pids(log)["sft"]
            os.kill(rank, signal.SIGKILL)  # before its launcher, whose death it would take for the wish to stop
            os.kill(first.pid, signal.SIGKILL)
            check(second.wait(60) != 0, "a rank went on alone")
            said = of_second.read_text()
            check("rank 0 of 2 is lost" in said, said[-2000:])


def test_inference_on_two_nodes_answers_at_one_address():
    with harness.workspace("inference-nodes") as folder:
        model = harness.tiny_model(folder / "model")
        ports = harness.free_ports(2)
        command = ["inference", "--model.name", model, "--server.port", ports[0], "--backend-port", ports[1], "--output-dir", folder / "out",
                   "--deployment.type", "multi_node", "--deployment.num-nodes", 2, "--deployment.gpus-per-node", 1]
        with nodes(folder, 2, *command) as agents:
            def engines():
                with contextlib.suppress(OSError):
                    status, text = harness.request(ports[0], "GET", "/metrics", timeout=5)
                    return status == 200 and all(f"http://{host}:{ports[1]}" in text for host in HOSTS[:2])
            harness.wait_until(lambda: engines() or any(agent.poll() is not None for agent, _ in agents), 90, "two engines behind the router")
            texts = set()
            for number in range(6):
                body = {"model": str(model), "prompt": "a b c", "max_tokens": 4, "temperature": 0}
                status, reply = harness.wait_until(lambda: (lambda r: r if r[0] == 200 else None)(
                    harness.request(ports[0], "POST", "/v1/completions", body, {"X-Session-ID": str(number)})), 60, "an answer")
                texts.add(reply["choices"][0]["text"])
            check(len(texts) == 1, f"engines of two nodes differ: {texts}")
            agents[0][0].send_signal(signal.SIGTERM)
            check(agents[0][0].wait(180) == 0, agents[0][1].read_text()[-2000:])
            agents[1][0].wait(180)  # ends with the router's node


def test_the_command_of_two_trainer_pods_is_one_trainer_of_two_ranks():
    with harness.workspace("pods") as folder:
        model = harness.tiny_model(folder / "model")
        prl("k8s", "render", "--output-dir", folder / "k8s", "--example", "reverse-text", "--trainer.replicas", 2)
        manifests = (folder / "k8s/manifests.yaml").read_text()
        command = re.search(r'"ulimit -n 32000; prl (launch .*) \|\| exit', manifests)[1].replace("/app/", f"{harness.ROOT}/").split()
        output = command.index("--output-dir")
        train = command[:output] + ["--model.name", model, "--data.fake", "--weight-broadcast.type", "filesystem", "--max-steps", STEPS,
                                    "--compute.device", "cpu", "--metrics-server", "None", "--wandb", "None", "--output-dir"]
        prl("trainer", *train[train.index("trainer") + 1:], folder / "one")
        meet = f"127.0.0.1:{harness.free_port()}"
        with contextlib.ExitStack() as stack:
            pods = []
            for pod in range(2):
                env = {"POD_NAME": f"prime-rl-trainer-{pod}", "STATEFUL_REPLICAS": "2", "PRL_RDZV_ENDPOINT": meet, "PRL_NODE_HOST": "127.0.0.1"}
                log = folder / f"pod_{pod}.log"
                pods.append((stack.enter_context(harness.running(*train, folder / "two", env=env, log=log)), log))
            finish(pods)
        check(weights(folder / "two") == weights(folder / "one"), "two pods gave other weights")
        _, answer = prl("k8s", "render", "--output-dir", folder / "wrong", "--trainer.replicas", 2, "--trainer.auto-start",
                        "--trainer.command.0", "prl", "--trainer.command.1", "trainer", expect=1)
        check("trainer.command: would start 2 trainers" in answer, answer)


if __name__ == "__main__":
    harness.main(test_the_command_of_two_trainer_pods_is_one_trainer_of_two_ranks,
                 test_rl_on_two_inference_and_two_trainer_nodes_gives_the_weights_of_one_process,
                 test_what_dies_on_any_node_is_healed_and_costs_no_bit, test_a_failure_on_one_node_ends_the_run_on_all, test_sft_takes_its_nodes_from_the_deployment,
                 test_a_node_that_loses_the_first_one_ends, test_inference_on_two_nodes_answers_at_one_address)
