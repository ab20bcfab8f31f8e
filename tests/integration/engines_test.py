#!/usr/bin/env python3
"""Several inference engines: equal rollouts on any number of them, engines that die in a run, and `prl router` in front of them."""
import concurrent.futures
import contextlib
import ctypes
import errno
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import threading

import harness
from harness import check, prl

STEPS = 6


def arguments(folder, out, engines, *flags, **top):
    config = harness.rl_config(folder / f"{out.name}.toml", harness.warm_model(), **{"max_async_level": 0, "max_steps": STEPS, **top})
    return ["rl", "@", config, "--output-dir", out, "--ckpt", "--deployment.type", "single_node", "--compute.device", "cpu",
            "--inference.parallel.dp", engines, "--inference.server.port", free_ports(engines), "--no-dashboard", *flags]


def free_ports(count):
    """The first of some free ports in a row."""
    for _ in range(100):
        first = harness.free_port()
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
            except (OSError, OverflowError):
                continue
    raise harness.Failure(f"no {count} free ports in a row")


def weights(out, step=STEPS):
    return harness.digest(pathlib.Path(out) / f"weights/step_{step}", "*.safetensors")


def proofs(out):
    return harness.rows_of(out / "logs/weight_proofs.jsonl")


def test_one_engine_and_three_give_equal_rollouts():
    with harness.workspace("engines") as folder:
        for engines in (1, 3):
            prl(*arguments(folder, folder / f"of{engines}", engines))
        check(weights(folder / "of1") == weights(folder / "of3"), "three engines gave other weights than one")
        for policy in ("round_robin", "cache_aware"):
            prl(*arguments(folder, folder / policy, 3, "--inference.router.type", "vllm-router", "--inference.router.policy", policy))
            check(weights(folder / "of1") == weights(folder / policy), f"{policy}: three engines gave other weights than one")
        seen = proofs(folder / "of3")
        check(len({line["engine"] for line in seen}) == 3 and all(line["is_proven"] for line in seen), f"not every engine proved its weights: {seen[:3]}")
        logs = [folder / "of3/logs/latest" / name for name in ("inference.log", "inference_1.log", "inference_2.log")]
        check(all(path.stat().st_size > 0 for path in logs), "an engine has no log")


def test_devices_that_share_layers_give_equal_rollouts():
    with harness.workspace("shared-layers") as folder:
        prl(*arguments(folder, folder / "one", 1))
        for name, flags in {"files": [], "nccl": ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", harness.free_port()]}.items():
            prl(*arguments(folder, folder / name, 1, "--inference.parallel.tp", 2, *flags))
            check(weights(folder / "one") == weights(folder / name), f"{name}: an engine of two devices gave other weights than one of one")
            seen = proofs(folder / name)
            check(len(seen) >= STEPS and all(line["is_proven"] for line in seen), f"{name}: the engine did not prove its weights: {seen[:3]}")
            rows = harness.metrics(folder / name)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), f"{name}: sampler and trainer disagree")
        lora = ["--trainer.model.lora.rank", 4, "--trainer.optim.lr", "2e-3"]
        named = ["--orchestrator.student.model.lora.name", "alpha", "--weight-broadcast.type", "nccl", "--weight-broadcast.port", harness.free_port()]
        prl(*arguments(folder, folder / "adapter", 1, *lora))
        check(weights(folder / "one") != weights(folder / "adapter"), "an adapter was not trained")
        for name, flags in {"adapter-files": [], "adapter-named": named}.items():
            prl(*arguments(folder, folder / name, 1, *lora, "--inference.parallel.tp", 2, *flags))
            check(weights(folder / "adapter") == weights(folder / name), f"{name}: an engine of two devices gave other weights than one of one")
            check(all(line["is_proven"] for line in proofs(folder / name)), f"{name}: the engine did not prove its weights")
        text = (folder / "files/logs/latest/inference.log").read_text()
        check("on 2 devices that share the layers" in text, f"the engine had one device: {text[-2000:]}")
        refusals = {"3": "num_attention_heads = 4", "2": "moe_intermediate_size = 40"}
        harness.tiny_model(folder / "experts", "--family", "qwen3_moe", "--num-experts", 4, "--num-experts-per-tok", 2, "--moe-intermediate-size", 40)
        for (devices, wanted), model in zip(refusals.items(), (harness.warm_model(), folder / "experts")):
            said = "".join(prl("inference", "--model.name", model, "--parallel.tp", devices, "--compute.device", "cpu", "--server.port",
                               harness.free_port(), expect=None))
            check(wanted in said, f"{devices} devices: {said[-1000:]}")


def test_layers_without_rotary_positions_are_sampled_as_they_are_trained():
    with harness.workspace("unrotated-layers") as folder:
        model = harness.tiny_model(folder / "model", "--family", "smollm3")
        prl("sft", "--model.name", model, "--data.name", harness.sft_data(folder / "sft.jsonl", 256), "--data.seq-len", 256, "--data.batch-size", 4,
            "--max-steps", 60, "--optim.lr", "5e-3", "--ckpt", "--output-dir", folder / "sft")
        warm = folder / "sft/weights/step_60"
        for name, devices in {"one": 1, "two": 2}.items():
            prl(*arguments(folder, folder / name, 1, "--model.name", warm, "--inference.parallel.tp", devices, max_steps=2))
            rows = harness.metrics(folder / name)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in (1, 2)), f"{name}: sampler and trainer disagree")
            check(any(rows[step]["optim/grad_norm"] > 0 for step in (1, 2)), f"{name}: nothing was trained")
        check(weights(folder / "one", 2) == weights(folder / "two", 2), "an engine of two devices gave other weights than one of one")
        config = json.loads((folder / "one/weights/step_2/config.json").read_text())
        check((config["model_type"], config["no_rope_layers"]) == ("smollm3", [1, 0]), f"what was saved: {config}")


def test_engines_that_die_cost_no_rollout():
    with harness.workspace("engine-deaths") as folder:
        prl(*arguments(folder, folder / "calm", 1, max_steps=16))
        out, log = folder / "out", folder / "log"
        with harness.running(*arguments(folder, out, 2, max_steps=16), log=log) as process:
            def pids():
                return harness.role_pids(log)

            def at_step(step):
                harness.wait_until(lambda: (out / f"rollouts/step_{step}").exists() or process.poll() is not None, 60, f"step {step}")
                check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
            at_step(2)
            os.kill(pids()["inference_1"], signal.SIGKILL)
            harness.wait_until(lambda: log.read_text().count("started inference_1") == 2, 30, "the engine to be started again")
            at_step(6)
            os.kill(pids()["inference"], signal.SIGKILL)
            check(process.wait(360) == 0, f"the run failed: {log.read_text()[-3000:]}")
        check(weights(out, 16) == weights(folder / "calm", 16), "a run whose engines died has other weights than one that was left alone")
        text = log.read_text() + (out / "logs/latest/orchestrator.log").read_text()
        check("is lost" in text and "is back after" in text, f"the deaths were not told: {text[-2000:]}")


class Frozen:
    """The threads of a process but its first one stand still, as in a deadlock: it is neither dead nor stopped, and answers nothing."""
    SEIZE, INTERRUPT, ALL = 0x4206, 0x4207, 0x40000000

    def __init__(self, pid):
        self.pid, self.problem = pid, None
        self.are_frozen = threading.Event()
        self.thread = threading.Thread(target=self.trace, daemon=True)  # only the thread that traces may wait for what it traces
        self.thread.start()
        check(self.are_frozen.wait(30), "the threads were not frozen in 30 s")
        check(self.problem is None, f"no thread can be frozen here: {self.problem}")

    def trace(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        threads = [int(name) for name in os.listdir(f"/proc/{self.pid}/task") if int(name) != self.pid]
        for request in (self.SEIZE, self.INTERRUPT):
            for thread in threads:
                if libc.ptrace(request, thread, None, None) != 0 and ctypes.get_errno() != errno.ESRCH:  # one that has ended since
                    self.problem = os.strerror(ctypes.get_errno())
        self.are_frozen.set()
        for thread in threads:  # until it is killed: its parent hears of its end only then
            try:
                while os.WIFSTOPPED(os.waitpid(thread, self.ALL)[1]):
                    pass
            except ChildProcessError:
                pass


def test_an_engine_that_hangs_is_replaced_and_costs_no_bit():
    with harness.workspace("engine-hang") as folder:
        prl(*arguments(folder, folder / "calm", 1, max_steps=16))
        out, log = folder / "out", folder / "log"
        with harness.running(*arguments(folder, out, 2, "--deployment.max-hung-seconds", 6, max_steps=16), log=log) as process:
            harness.wait_until(lambda: (out / "rollouts/step_3").exists() or process.poll() is not None, 60, "step 3")
            check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
            Frozen(harness.role_pids(log)["inference_1"])
            check(process.wait(360) == 0, f"the run failed: {log.read_text()[-3000:]}")
        text = log.read_text()
        check("has not said at" in text and "it did not say that it is well" in text, f"the hang was not told: {text[-3000:]}")
        check(text.count("started inference_1") >= 2, f"the engine was not started again: {text[-3000:]}")
        check(weights(out, 16) == weights(folder / "calm", 16), "a run whose engine hung has other weights than one that was left alone")


def test_weights_from_the_trainers_memory_are_those_of_files_and_an_engine_that_misses_one_catches_up():
    with harness.workspace("engine-broadcast") as folder:
        prl(*arguments(folder, folder / "files", 1, max_steps=60))
        out, log = folder / "out", folder / "log"
        flags = ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", harness.free_port()]
        with harness.running(*arguments(folder, out, 2, *flags, max_steps=60), log=log) as process:
            harness.wait_until(lambda: (out / "rollouts/step_3").exists() or process.poll() is not None, 60, "step 3")
            check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
            os.kill(harness.role_pids(log)["inference_1"], signal.SIGKILL)
            check(process.wait(540) == 0, f"the run failed: {log.read_text()[-3000:]}")
        check(weights(out, 60) == weights(folder / "files", 60), "weights that went through memory gave another run than files")
        announced = sorted((out / "broadcasts").glob("step_*"))
        check(announced and not list((out / "broadcasts").glob("step_*/*.safetensors")), f"tensors were written: {announced}")
        check(all((step / "STABLE").exists() and (step / "manifest.json").exists() for step in announced), f"{announced}")
        check(all(line["is_proven"] for line in proofs(out)), "a proof failed")
        text = (out / "logs/latest/orchestrator.log").read_text()
        check("is lost" in text and "is back after" in text, f"the loss was not told: {text[-1500:]}")
        log_of_engine = (out / "logs/latest/inference_1.log").read_text()
        check("from tcp://127.0.0.1:" in log_of_engine, log_of_engine[-1500:])


def stream(port, path, body, on_event=lambda number: None):
    """Events of a streamed reply, without the last [DONE]."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise harness.Failure(f"status {reply.status}: {reply.read()[:500]}")
        events = []
        for line in iter(reply.readline, b""):
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return events
            events.append(json.loads(data))
            on_event(len(events))
        raise harness.Failure(f"the stream ended without [DONE] after {len(events)} events")
    finally:
        connection.close()


def joined(events):
    """Text, token ids and ends of a stream of completions."""
    errors = [event for event in events if "error" in event]
    check(not errors, f"the stream has an error: {errors}")
    choices = [choice for event in events for choice in event["choices"]]
    return ("".join(choice.get("text") or "" for choice in choices),
            [token for choice in choices for token in choice.get("token_ids") or []],
            [choice["finish_reason"] for choice in choices if choice.get("finish_reason")])


@contextlib.contextmanager
def engines_and_router(folder, count):
    folder = folder / f"of{count}"
    folder.mkdir()
    model = harness.tiny_model(folder / "model", "--max-position-embeddings", 4096)
    with contextlib.ExitStack() as stack:
        ports = [harness.free_port() for _ in range(count)]
        engines = {port: stack.enter_context(harness.running("inference", "--model.name", model, "--server.port", port, "--compute.device", "cpu",
                                                             "--compute.num-threads", 1, "--output-dir", folder / f"e{port}",
                                                             log=folder / f"engine-{port}.log")) for port in ports}
        port = harness.free_port()
        stack.enter_context(harness.running("router", "--engines", ",".join(f"http://127.0.0.1:{p}" for p in ports), "--port", port,
                                            "--output-dir", folder / "router", log=folder / "router.log"))
        for each in ports:
            harness.wait_until(lambda: harness.is_healthy(each), 60, "an engine")

        def ready():
            with contextlib.suppress(OSError):
                return sum(e["state"] == "ready" for e in harness.request(port, "GET", "/engines")[1]["engines"]) == count
        harness.wait_until(ready, 60, "the router to see its engines")
        yield model, engines, port


def owner_of(engines, router):
    """The engine with a request under way, and its port."""
    for engine in harness.request(router, "GET", "/engines")[1]["engines"]:
        if engine["num_requests"] > 0:
            port = int(engine["url"].rsplit(":", 1)[1])
            return engines[port], port
    return None


def test_a_stream_goes_on_with_the_same_tokens_when_its_engine_is_killed():
    with harness.workspace("router-stream") as folder, engines_and_router(folder, 3) as (model, engines, port):
        body = {"model": str(model), "prompt": "abcd", "max_tokens": 600, "temperature": 1.0, "seed": 11, "ignore_eos": True,
                "return_token_ids": True}
        calm = joined(stream(port, "/v1/completions", body))
        check(len(calm[1]) == 600, f"wanted 600 tokens, found {len(calm[1])}")
        killed = []

        def kill_once(number):
            if number == 40 and not killed:
                engine, where = harness.wait_until(lambda: owner_of(engines, port), 10, "the engine of the stream")
                engine.kill()
                killed.append(where)
        disturbed = joined(stream(port, "/v1/completions", body, kill_once))
        check(killed, "no engine was killed")
        check(disturbed == calm, f"other tokens: {len(disturbed[1])} of {len(calm[1])}")
        # Whole replies too, and an engine that was stopped in place of killed.
        whole = {**body, "max_tokens": 300}
        wanted = harness.request(port, "POST", "/v1/completions", whole)[1]["choices"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            several = [pool.submit(harness.request, port, "POST", "/v1/completions", whole) for _ in range(4)]
            engine, where = harness.wait_until(lambda: owner_of({p: e for p, e in engines.items() if p not in killed}, port), 10, "an engine at work")
            engine.send_signal(signal.SIGKILL)
            killed.append(where)
            for future in several:
                status, reply = future.result()
                check(status == 200 and reply["choices"] == wanted, f"status {status}: {str(reply)[:300]}")
        page = harness.request(port, "GET", "/metrics")[1]
        check("prl_router:engines_lost_total 2" in page, page[:600])
        for where in killed:
            del engines[where]
        # The last engine leaves: nobody is left, and requests wait until one joins.
        last = next(iter(engines))
        check(harness.request(port, "POST", "/engines", {"url": f"http://127.0.0.1:{last}"})[0] == 409, "an engine was added twice")
        check(harness.request(port, "GET", "/health")[0] == 200, "one engine is left")
        check(harness.request(port, "DELETE", f"/engines?url=http://127.0.0.1:{last}")[0] == 202, "the engine could not be drained")
        harness.wait_until(lambda: str(last) not in json.dumps(harness.request(port, "GET", "/engines")[1]), 20, "the engine to leave")
        check(harness.request(port, "GET", "/health")[0] == 503, "no engine is left")
        late = []
        waiting = threading.Thread(target=lambda: late.append(harness.request(port, "POST", "/v1/completions", whole)))
        waiting.start()
        harness.wait_until(lambda: "prl_router:requests_waiting 1" in harness.request(port, "GET", "/metrics")[1], 10, "the request to wait")
        check(harness.request(port, "POST", "/engines", {"url": f"http://127.0.0.1:{last}/v1"})[0] == 201, "the engine could not be added")
        waiting.join(60)
        check(late and late[0][0] == 200 and late[0][1]["choices"] == wanted, f"{late}")


def test_weights_go_through_the_router_to_engines_that_join_late():
    with harness.workspace("router-weights") as folder, engines_and_router(folder, 2) as (model, engines, port):
        other = harness.tiny_model(folder / "other", "--max-position-embeddings", 4096, "--overwrite", "--seed", 8)
        first, second = engines
        status, proof = harness.request(port, "POST", "/update_weights", {"weight_dir": str(other), "version": 5})
        check(status == 200 and proof["policy_version"] == 5, f"{status} {proof}")
        for each in engines:
            check(harness.request(each, "GET", "/weight_proof")[1] == proof, "an engine has other weights")
        engines[second].kill()
        engines[second].wait(10)
        harness.wait_until(lambda: "\"down\"" in json.dumps(harness.request(port, "GET", "/engines")[1]), 20, "the engine to be missed")
        with harness.running("inference", "--model.name", model, "--server.port", second, "--compute.device", "cpu", "--compute.num-threads", 1,
                             "--output-dir", folder / "again", log=folder / "again.log"):
            def caught_up():
                states = harness.request(port, "GET", "/engines")[1]["engines"]
                return all(e["state"] == "ready" and e["policy_version"] == 5 for e in states)
            harness.wait_until(caught_up, 60, "the engine to catch up")
            check(harness.request(second, "GET", "/weight_proof")[1] == proof, "the engine came back with other weights")
        check("is back after" in (folder / "of2/router.log").read_text(), (folder / "of2/router.log").read_text()[-600:])


def test_copies_of_a_model_take_turns_if_that_is_wanted():
    """Of `prl inference` with two engines: requests of one session by the policy of its router."""
    for policy, wanted in (("consistent_hash", [0, 6]), ("round_robin", [3, 3]), ("cache_aware", [0, 6])):
        with harness.workspace("router-policy") as folder:
            model, port = harness.tiny_model(folder / "model"), free_ports(3)
            with harness.running("inference", "--model.name", model, "--server.port", port, "--backend-port", port + 1, "--parallel.dp", 2,
                                 "--router.type", "vllm-router", "--router.policy", policy, "--compute.device", "cpu", "--compute.num-threads", 1,
                                 "--output-dir", folder / "out", log=folder / "log"):
                def engines():
                    with contextlib.suppress(OSError):
                        return harness.request(port, "GET", "/engines")[1]["engines"]
                    return []
                harness.wait_until(lambda: [e["state"] for e in engines()] == ["ready"] * 2, 60, "both engines")
                for seed in range(6):
                    status, reply = harness.request(port, "POST", "/v1/completions", {"model": str(model), "prompt": "ab", "max_tokens": 4, "seed": seed},
                                                    headers={"X-Session-ID": "one"} if policy != "cache_aware" else {})
                    check(status == 200, f"status {status}: {reply}")
                check(sorted(e["num_finished"] for e in engines()) == wanted, f"{policy}: {engines()}")


def prefix_hits(folder, count, num_sessions=16, num_turns=4):
    """The part of all prompt tokens that `count` engines found in their caches, over conversations that grow turn by turn."""
    with engines_and_router(folder, count) as (model, engines, port):
        def converse(number):
            prompt = f"session {number:03}: " + "abcdefgh" * (8 + number % 5)
            for turn in range(num_turns):
                body = {"model": str(model), "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 31 * number + turn, "ignore_eos": True}
                status, reply = harness.request(port, "POST", "/v1/completions", body, headers={"X-Session-ID": f"s{number}"})
                check(status == 200, f"status {status}: {reply}")
                prompt += reply["choices"][0]["text"].encode("ascii", "replace").decode() + f" turn {turn}. " + "ijklmnop" * 4
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(converse, range(num_sessions)))
        sums, busy = {"queries": 0.0, "hits": 0.0}, 0
        for each in engines:
            page = harness.request(each, "GET", "/metrics")[1]
            found = {key: float(re.search(rf"^vllm:prefix_cache_{key}_total(?:{{[^}}]*}})? (\S+)$", page, re.M)[1]) for key in sums}
            busy += found["queries"] > 0
            sums = {key: sums[key] + found[key] for key in sums}
        check(busy == count, f"{busy} of {count} engines were used")
        return sums["hits"] / sums["queries"]


def test_four_engines_find_prefixes_as_one_does():
    with harness.workspace("router-prefixes") as folder:
        one, four = (prefix_hits(folder, count) for count in (1, 4))
        print(f"prefix hits: {one:.4f} with one engine, {four:.4f} with four")
        check(one > 0.3, f"hardly a prefix was found with one engine: {one}")
        check(four >= 0.91 * one, f"four engines found {four:.4f}, one {one:.4f}")


harness.main(test_one_engine_and_three_give_equal_rollouts, test_devices_that_share_layers_give_equal_rollouts,
             test_layers_without_rotary_positions_are_sampled_as_they_are_trained, test_engines_that_die_cost_no_rollout, test_an_engine_that_hangs_is_replaced_and_costs_no_bit,
             test_weights_from_the_trainers_memory_are_those_of_files_and_an_engine_that_misses_one_catches_up,
             test_a_stream_goes_on_with_the_same_tokens_when_its_engine_is_killed,
             test_weights_go_through_the_router_to_engines_that_join_late, test_copies_of_a_model_take_turns_if_that_is_wanted, test_four_engines_find_prefixes_as_one_does)
