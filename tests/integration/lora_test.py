#!/usr/bin/env python3
"""Adapters in RL: the engine samples with the adapter that the trainer has, in one process and in several, after a resume too."""
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import struct
import threading
import time

import harness
from harness import check, prl, request

LORA = ["--trainer.model.lora.rank", 4, "--trainer.model.lora.alpha", 16, "--trainer.optim.lr", "5e-3"]
SAVE = ["--ckpt", "--ckpt.interval", 2, "--ckpt.weights.save-adapter-separately"]
STEPS = 4


def tensors(path):
    """Names and shapes of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return {name: entry["shape"] for name, entry in json.loads(data[8:8 + size]).items() if name != "__metadata__"}


def run(folder, name, *flags, steps=STEPS):
    config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_async_level=0, max_steps=steps)
    out = folder / name
    prl("rl", "@", config, "--output-dir", out, *LORA, *SAVE, *flags)
    return out


def check_lock_step(out):
    rows = harness.metrics(out)
    check(set(rows) >= set(range(1, STEPS + 1)), f"steps {sorted(rows)}")
    worst = max(abs(rows[step]["mismatch_kl/all/mean"]) for step in range(1, STEPS + 1))
    check(worst == 0, f"{out.name}: sampler and trainer differ: mismatch_kl {worst}")
    proofs = harness.rows_of(out / "logs/weight_proofs.jsonl")
    check(proofs and all(proof["is_proven"] for proof in proofs), f"{proofs}")


def adapter_files(out):
    return harness.digest(out / f"weights/step_{STEPS}/lora_adapters", "*.safetensors")


def test_one_process_and_several_learn_the_same_adapter():
    with harness.workspace("lora") as folder:
        one = run(folder, "one")
        check_lock_step(one)
        adapter = one / f"weights/step_{STEPS}/lora_adapters"
        config = json.loads((adapter / "adapter_config.json").read_text())
        check(config["r"] == 4 and config["lora_alpha"] == 16 and "q_proj" in config["target_modules"], f"{config}")
        names = tensors(adapter / "adapter_model.safetensors")
        check(names["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == [4, 64], f"{names}")
        check(all(".lora_A." in name or ".lora_B." in name for name in names), f"{names}")
        check(len(names) == 2 * 2 * 7, f"{len(names)} tensors of two layers with seven matrices")
        masters = tensors(one / f"checkpoints/step_{STEPS}/trainer/model.safetensors")
        check(all(".lora_" in name for name in masters), f"the checkpoint holds more than the adapter: {masters}")
        merged = harness.digest(one / f"weights/step_{STEPS}", "model*.safetensors")
        check(merged != harness.digest(one / "weights/step_2", "model*.safetensors"), "two steps of training changed nothing")

        several = run(folder, "several", "--deployment.type", "single_node", "--inference.server.port", harness.free_port())
        check_lock_step(several)
        check(adapter_files(several) == adapter_files(one), "one process and several trained different adapters")
        check(harness.digest(several / f"weights/step_{STEPS}", "model*.safetensors") == merged, "the merged models differ")
        broadcasts = sorted(path.name for path in (several / "broadcasts").glob("step_*/*") if path.is_file())
        check("adapter_model.safetensors" in broadcasts and not any(name.startswith("model") for name in broadcasts),
              f"more than the adapter was sent: {broadcasts}")

        first = run(folder, "resumed", steps=2)
        check((first / "weights/step_2/lora_adapters").exists(), "no adapter of step 2")
        again = run(folder, "resumed", "--ckpt.resume-step", -1)
        check(adapter_files(again) == adapter_files(one), "a resumed run trained another adapter")

        # The merged model is the policy: it answers as the run's engine would have.
        prl("eval", "--model.name", one / f"weights/step_{STEPS}", "--env.id", "reverse-text", "--env.args", json.dumps(harness.ENV_ARGS),
            "--num-examples", 4, "--group-size", 1, "--sampling.max-tokens", 48, "--output-dir", folder / "eval")


def learned(out):
    """What a run's steps say of its samples and its training, nothing of the clock or the machine."""
    families = ("loss/", "reward/", "mismatch_kl/", "entropy/", "optim/", "seq_len/", "progress/", "batch/", "is_truncated/")
    return {step: {key: value for key, value in row.items() if key.startswith(families)} for step, row in harness.metrics(out).items()}


def check_from_memory(out):
    """The adapter left no file on its way."""
    announced = {path.name for path in (out / "broadcasts").rglob("*") if path.is_file()}
    check(announced == {"STABLE", "manifest.json"}, f"files of an adapter that goes from memory to memory: {announced}")


def test_an_adapter_from_the_trainers_memory_is_that_of_files():
    """As the model of its engine, and under a name beside others: the same bits and the same numbers as over files, on two engines."""
    with harness.workspace("lora-memory") as folder:
        for kind, flags in (("model", []), ("named", ["--orchestrator.student.model.lora.name", "alpha"])):
            outs = {}
            for transport in ("filesystem", "nccl"):
                ports = harness.free_ports(3)
                over = ["--weight-broadcast.type", transport, *(["--weight-broadcast.port", ports[2]] if transport == "nccl" else [])]
                outs[transport] = run(folder, f"{kind}-{transport}", *flags, *over, "--deployment.type", "single_node",
                                      "--inference.server.port", ports[0])
                check_lock_step(outs[transport])
            files, memory = outs["filesystem"], outs["nccl"]
            check(adapter_files(memory) == adapter_files(files), f"{kind}: an adapter from memory gave another run than files")
            masters = [harness.digest(out / f"checkpoints/step_{STEPS}/trainer", "*.safetensors") for out in (files, memory)]
            check(masters[0] == masters[1], f"{kind}: masters and optimizer differ")
            wanted, found = learned(files), learned(memory)
            check(len(wanted[STEPS]) > 10 and found == wanted, f"{kind}: metrics differ: {wanted} and {found}")
            check_from_memory(memory)
            text = (memory / "logs/latest/inference.log").read_text()
            check("from tcp://127.0.0.1:" in text and ("LoRA adapter 'alpha' v" in text) == (kind == "named"), text[-1500:])
            one, two = (harness.rows_of(out / "logs/weight_proofs.jsonl") for out in (files, memory))
            check([row["engine_checksum"] for row in one] == [row["engine_checksum"] for row in two], f"{one} and {two}")


def test_roles_that_were_started_apart_and_an_engine_that_is_lost():
    """The adapter goes from `prl trainer` to `prl inference`; an engine that is killed gets the newest one when it is back."""
    with harness.workspace("lora-apart") as folder:
        steps, ports = 12, harness.free_ports(2)
        flags = ["--orchestrator.student.model.lora.name", "alpha", "--deployment.type", "single_node", "--trainer.optim.lr", "2e-3"]
        wanted = run(folder, "files", *flags, "--inference.server.port", harness.free_port(), steps=steps)
        out = folder / "out"
        over = ["--weight-broadcast.type", "nccl", "--weight-broadcast.port", ports[1], "--output-dir", out, "--ckpt", "--ckpt.interval", 2]
        args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in harness.ENV_ARGS.items())
        (folder / "orch.toml").write_text(f"""
max_steps = {steps}
seq_len = 256
batch_size = 16
group_size = 4
max_async_level = 0
[student.model]
name = {json.dumps(str(harness.warm_model()))}
[student.model.lora]
name = "alpha"
[student.client]
base_url = ["http://127.0.0.1:{ports[0]}/v1"]
[train.sampling]
max_completion_tokens = 48
[[train.env]]
id = "reverse-text"
args = {{ {args} }}
""")
        logs = {role: folder / f"{role}.log" for role in ("trainer", "orchestrator", "first", "second")}

        def engine(name):
            return harness.running("inference", "--model.name", harness.warm_model(), "--server.port", ports[0], "--model.max-model-len", 256,
                                   "--max-num-seqs", 16, "--enable-lora", log=logs[name])

        with contextlib.ExitStack() as stack:
            trainer = stack.enter_context(harness.running(
                "trainer", "--model.name", harness.warm_model(), "--model.seq-len", 256, "--model.lora.rank", 4, "--model.lora.alpha", 16,
                "--optim.lr", "2e-3", "--max-steps", steps, "--max-async-level", 0, "--ckpt.weights.save-adapter-separately", *over,
                log=logs["trainer"]))
            orchestrator = stack.enter_context(harness.running("orchestrator", "@", folder / "orch.toml", *over, log=logs["orchestrator"]))
            with engine("first") as first:
                # A step takes a tenth of a second: the run must not be over before this looks again.
                with harness.slowed(trainer.pid, running=0.02, stopped=0.2):
                    harness.wait_until(lambda: trainer.poll() is not None or (out / "broadcasts/step_3/STABLE").exists(), 120, "version 3")
                    check(trainer.poll() is None and first.poll() is None, logs["trainer"].read_text()[-2000:])
                    first.kill()
            stack.enter_context(engine("second"))
            for role, process in (("orchestrator", orchestrator), ("trainer", trainer)):
                harness.wait_until(lambda: process.poll() is not None, 180, f"the {role} to end")
                check(process.returncode == 0, f"the {role} failed: {logs[role].read_text()[-3000:]}")
        check(harness.digest(out / f"weights/step_{steps}/lora_adapters", "*.safetensors") ==
              harness.digest(wanted / f"weights/step_{steps}/lora_adapters", "*.safetensors"), "another adapter than over files")
        rows = harness.metrics(out)
        check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, steps + 1)), "sampler and trainer differ")
        proofs = harness.rows_of(out / "logs/weight_proofs.jsonl")
        check(proofs and all(proof["is_proven"] for proof in proofs), f"{proofs}")
        check_from_memory(out)
        for name in ("first", "second"):
            check(f"from tcp://127.0.0.1:{ports[1]}" in logs[name].read_text(), f"{name}: {logs[name].read_text()[-1500:]}")


def test_a_rank_that_takes_over_sends_the_adapter():
    """The rank that served engines is killed; the next one serves at its address, and the adapter is that of a calm run."""
    with harness.workspace("lora-healing") as folder:
        steps, lr, ports = 30, ["--trainer.optim.lr", "1e-3"], harness.free_ports(2)
        calm = run(folder, "calm", *lr, steps=steps)
        config, out, log = folder / "rl.toml", folder / "out", folder / "log"
        with harness.running("rl", "@", config, "--output-dir", out, *LORA, *SAVE, *lr, "--deployment.type", "single_node",
                             "--deployment.num-train-gpus", 2, "--trainer.healing", "--inference.server.port", ports[0],
                             "--orchestrator.student.model.lora.name", "alpha", "--weight-broadcast.type", "nccl",
                             "--weight-broadcast.port", ports[1], "--trainer.model.reshard-after-forward", log=log) as process:
            harness.wait_until(lambda: (out / "broadcasts/step_3/STABLE").exists() or process.poll() is not None, 60, "version 3")
            check(process.poll() is None, f"the run ended early: {log.read_text()[-3000:]}")
            os.kill(harness.role_pids(log)["trainer"], signal.SIGKILL)
            check(process.wait(360) == 0, f"the run failed: {log.read_text()[-3000:]}")
        text = log.read_text()
        check("trainer was killed by signal 9" in text, f"nobody was killed: {text[-2000:]}")
        adapters = [harness.digest(each / f"weights/step_{steps}/lora_adapters", "*.safetensors") for each in (calm, out)]
        check(adapters[0] == adapters[1], "another adapter than in a calm run")
        check_from_memory(out)


def test_an_adapter_in_float32_beside_a_base_in_bfloat16():
    with harness.workspace("lora-dtype") as folder:
        flags = ["--compute.dtype", "bfloat16", "--trainer.model.lora.dtype", "float32"]
        one = run(folder, "one", *flags)
        several = run(folder, "several", *flags, "--deployment.type", "single_node", "--inference.server.port", harness.free_port())
        for out in (one, several):
            check_lock_step(out)
        check(adapter_files(several) == adapter_files(one), "one process and several trained different adapters")
        data = (one / f"weights/step_{STEPS}/lora_adapters/adapter_model.safetensors").read_bytes()
        header = json.loads(data[8:8 + struct.unpack_from("<Q", data)[0]])
        check(header["__metadata__"]["prl_base"].startswith("BF16:"), f"{header['__metadata__']}")
        check({entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}, "the adapter is not float32")
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=2)
        for extra, words in ((["--compute.dtype", "float32", "--trainer.model.lora.dtype", "bfloat16"], ("model.lora.dtype", "float32")),
                             ([*flags, "--inference.lora-dtype", "bfloat16"], ("inference.lora_dtype", "trainer.model.lora.dtype"))):
            _, stderr = prl("rl", "@", config, "--output-dir", folder / "out", *LORA, *extra, expect=1)
            check(all(word in stderr for word in words), f"{extra}: {stderr[-1000:]}")


def test_what_cannot_be_adapted_is_refused_before_the_run():
    with harness.workspace("lora-refused") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1)
        for flags, words in ((["--trainer.model.lora.target-modules", "no_such_proj"], ("no_such_proj", "q_proj")),
                             (["--trainer.model.lora.rank", 4, "--orchestrator.student.model.lora.rank", 8], ("lora.rank", "4")),
                             (["--orchestrator.student.model.lora.rank", 8], ("trainer.model.lora",))):
            _, stderr = prl("rl", "@", config, "--output-dir", folder / "out", *flags, expect=1)
            for word in words:
                check(word in stderr, f"{flags}: the error does not speak of {word}: {stderr[-2000:]}")


def train_adapter(folder, name, rank, seed, *flags):
    """An adapter of the warm model in PEFT's format, from two steps on made-up data."""
    out = folder / name
    prl("trainer", "--model.name", harness.warm_model(), "--model.seq-len", 64, "--data.fake", "--max-steps", 2, "--seed", seed, "--ckpt",
        "--ckpt.weights.save-adapter-separately", "--model.lora.rank", rank, "--optim.lr", "3e-2", "--output-dir", out, *flags)
    return out / "weights/step_2/lora_adapters"


@contextlib.contextmanager
def server(folder, *flags):
    log, port = folder / "inference.log", harness.free_port()
    with harness.running("inference", "--model.name", harness.warm_model(), "--model.served-name", "tiny", "--server.port", port,
                         "--model.max-model-len", 256, "--enable-lora", *flags, log=log) as process:
        harness.wait_until(lambda: harness.is_healthy(port) or process.poll() is not None, 30, "the server")
        check(process.poll() is None, f"the server ended: {log.read_text()[-2000:]}")
        yield port
        check(process.poll() is None, f"the server ended during the test: {log.read_text()[-2000:]}")


def complete(port, model, **fields):
    status, body = request(port, "POST", "/v1/completions", {"model": model, "prompt": "abcd", "max_tokens": 12, "temperature": 0,
                                                             "logprobs": 1, "ignore_eos": True, **fields})
    check(status == 200 and body["model"] == model, f"{model}: {status} {body}")
    return body["choices"][0]["text"], tuple(body["choices"][0]["logprobs"]["token_logprobs"])


def load(port, name, path, route="/v1/load_lora_adapter", **fields):
    return request(port, "POST", route, {"lora_name": name, "lora_path": str(path), **fields})


def refused(answer, status, *words):
    got, body = answer
    check(got == status, f"status {got}, wanted {status}: {body}")
    for word in words:
        check(word in json.dumps(body), f"the error does not speak of {word!r}: {body}")


def test_sft_trains_an_adapter_and_convert_merges_it():
    with harness.workspace("lora-sft") as folder:
        base = harness.tiny_model(folder / "base")
        data, out = harness.sft_data(folder / "data.jsonl", 64), folder / "sft"
        arguments = ["sft", "--model.name", base, "--data.name", data, "--data.seq-len", 128, "--data.batch-size", 8, "--max-steps", 12,
                     "--model.lora.rank", 8, "--optim.lr", "3e-2", "--ckpt", "--ckpt.weights.save-adapter-separately", "--compute.dtype", "float32"]
        prl(*arguments, "--output-dir", out)
        losses = [row["loss/mean"] for _, row in sorted(harness.metrics(out).items())]
        check(losses[-1] < losses[0] - 0.3, f"the loss went from {losses[0]} to {losses[-1]}")
        # Ranks that divide the layers of the base train and merge the same.
        prl(*arguments, "--output-dir", folder / "ranks", "--deployment.num-gpus", 3, "--model.reshard-after-forward")
        for part in ("weights/step_12", "weights/step_12/lora_adapters"):
            check(harness.tensor_digest(folder / "ranks" / part) == harness.tensor_digest(out / part), f"{part} is not that of one rank")
        merged = folder / "merged"
        prl("convert", base, "--adapter", out / "weights/step_12/lora_adapters", "--output-dir", merged, "--dtype", "float32")
        check(tensors(merged / "model.safetensors") == tensors(out / "weights/step_12/model.safetensors"), "other tensors than the trainer's")
        again = folder / "again"
        prl("convert", out / "weights/step_12", "--output-dir", again, "--dtype", "float32")
        check(harness.digest(merged, "model.safetensors") == harness.digest(again, "model.safetensors"),
              "the trainer and prl convert merge to different weights")
        _, stderr = prl("convert", base, "--adapter", folder / "nowhere", "--output-dir", folder / "none", expect=1)
        check("adapter_config.json" in stderr and not (folder / "none").exists(), f"{stderr[-500:]}")


def test_a_server_takes_adapters_by_name():
    with harness.workspace("lora-server") as folder:
        first, second = train_adapter(folder, "first", 4, 1), train_adapter(folder, "second", 8, 2)
        with server(folder, "--lora-modules", json.dumps({"first": str(first)})) as port:
            base = complete(port, "tiny")
            check(complete(port, "first") != base, "an adapter changes nothing")
            refused(request(port, "POST", "/v1/completions", {"model": "second", "prompt": "a"}), 404, "second")
            status, text = load(port, "second", second)
            check(status == 200 and text == "Success: LoRA adapter 'second' added successfully.", f"{status} {text}")
            own = {name: complete(port, name) for name in ("tiny", "first", "second")}
            check(len(set(own.values())) == 3, "adapters answer alike")
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                names = ["tiny", "first", "second"] * 4
                check([*pool.map(lambda name: complete(port, name), names)] == [own[name] for name in names], "a mixed batch answers otherwise")
            models = {model["id"]: model for model in request(port, "GET", "/v1/models")[1]["data"]}
            check(models["tiny"]["parent"] is None and models["second"]["parent"] == "tiny" and models["second"]["root"] == str(second),
                  f"{models}")
            # The same prompt again: a prefix of one adapter is never that of another, nor of its former weights.
            refused(load(port, "second", first), 400, "already been loaded")
            check(complete(port, "second") == own["second"], "a refused load changed the adapter")
            check(load(port, "second", first, "/load_lora_adapter") == (200, {"status": "ok"}), "no load in place")
            check(complete(port, "second") == own["first"], "the adapter did not change in place")
            check(load(port, "second", second, load_inplace=True)[0] == 200 and complete(port, "second") == own["second"], "nor back")
            proofs = [request(port, "GET", f"/weight_proof{query}")[1]["checksum"] for query in ("", "?adapter=first", "?adapter=second")]
            check(len(set(proofs)) == 3, f"{proofs}")
            status, text = request(port, "POST", "/v1/unload_lora_adapter", {"lora_name": "second"})
            check(status == 200 and text == "Success: LoRA adapter 'second' removed successfully.", f"{status} {text}")
            refused(request(port, "POST", "/v1/completions", {"model": "second", "prompt": "a"}), 404, "second")
            refused(request(port, "POST", "/v1/unload_lora_adapter", {"lora_name": "second"}), 404, "second")
            check(complete(port, "tiny") == base and complete(port, "first") == own["first"], "others changed")


def test_runs_share_a_server_as_their_weights():
    """Two runs whose requests always wait: tokens as 1 to 3. Then a run is paused, drained and cancelled, and a key samples for its own run alone."""
    key, admin, own = "the-key-of-the-server", "the-key-of-its-admin", "the-key-of-run-a-alone"

    def order(path, **body):
        return request(port, "POST", path, body, {"Authorization": f"Bearer {admin}"})

    def runs():
        return {run["name"]: run for run in request(port, "GET", "/runs", headers={"Authorization": f"Bearer {admin}"})[1]["data"]}

    def ask(model, tokens=64, bearer=key):
        return request(port, "POST", "/v1/completions", {"model": model, "prompt": "abcd", "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
                       {"Authorization": f"Bearer {bearer}"}, timeout=120)

    with harness.workspace("lora-runs") as folder:
        adapters = {name: train_adapter(folder, name, 4, seed) for name, seed in (("a", 1), ("b", 2))}
        with server(folder, "--server.api-key", key, "--server.admin-api-key", admin, "--max-num-seqs", 4) as port:
            for name, path in adapters.items():
                check(order("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))[0] == 200, f"adapter {name}")
            check(order("/runs", name="a", weight=1, api_key=own)[0] == 200 and order("/runs", name="b", weight=3)[0] == 200, "POST /runs")
            alone = ask("a", 40)[1]["choices"][0]["text"]
            is_over = threading.Event()

            def client(name):
                while not is_over.is_set():
                    check(ask(name)[0] == 200, f"a request of {name}")

            # Each has more clients than its share of the four slots, by far: on a loaded machine they are slow to ask again.
            with concurrent.futures.ThreadPoolExecutor(36) as pool:
                clients = [pool.submit(client, name) for name in "a" * 12 + "b" * 24]
                try:
                    shares, before, deadline = {"a": 0, "b": 0}, runs(), time.monotonic() + 60
                    while sum(shares.values()) < 25_000 and time.monotonic() < deadline:
                        time.sleep(0.02)
                        now = runs()
                        if all(state[name]["num_requests_waiting"] > 3 for state in (before, now) for name in "ab"):  # both want more than there is
                            for name in "ab":
                                shares[name] += now[name]["num_tokens"] - before[name]["num_tokens"]
                        before = now
                finally:
                    is_over.set()
                for one in clients:
                    one.result(120)
            check(sum(shares.values()) > 5000, f"too little was measured: {shares}")
            check(2.7 < shares["b"] / shares["a"] < 3.3, f"wanted 1 to 3, found {shares}")

            check(order("/runs/pause", name="a")[0] == 200, "pause")
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                held = pool.submit(ask, "a", 40, own)
                harness.wait_until(lambda: runs()["a"]["num_requests_waiting"] == 1, 30, "the request of the paused run")
                check(ask("b", 8)[0] == 200 and not held.done(), "the other run goes on, the paused one does not")
                check(order("/runs/resume", name="a")[0] == 200 and held.result(60)[1]["choices"][0]["text"] == alone, "other tokens after a pause")
                order("/runs/pause", name="a")
                held = pool.submit(ask, "a", 40)
                harness.wait_until(lambda: runs()["a"]["num_requests_waiting"] == 1, 30, "another request")
                status, reply = order("/runs/cancel", name="a")
                check(status == 200 and reply["num_requests"] == 1, f"{status} {reply}")
                held.result(60)
            check(order("/runs/drain", name="a")[0] == 200, "drain")
            refused(ask("a"), 503, "draining")
            check(ask("b", 4)[0] == 200 and order("/runs/resume", name="a")[0] == 200 and ask("a", 4)[0] == 200, "after the drain")
            refused(ask("b", bearer=own), 403, "may not use")
            refused(request(port, "POST", "/runs/pause", {"name": "b"}, {"Authorization": f"Bearer {own}"}), 403, "key")
            check(order("/runs/remove", name="b")[0] == 200 and set(runs()) == {"a"}, "remove")


def test_adapters_that_cannot_be_served_are_refused_by_name():
    with harness.workspace("lora-faults") as folder:
        good = train_adapter(folder, "good", 4, 1)

        def broken(name, change):
            place = folder / name
            shutil.copytree(good, place)
            change(place)
            return place

        def edit(place, **keys):
            path = place / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

        def overwrite(place, begin, data):
            path = place / "adapter_model.safetensors"
            content = bytearray(path.read_bytes())
            content[begin:begin + len(data) or None] = data
            path.write_bytes(harness.without_checksum(content))

        def truncate(place):
            path = place / "adapter_model.safetensors"
            path.write_bytes(path.read_bytes()[:-500])

        for name, shape in (("other", ["--hidden-size", 128]), ("stranger", ["--seed", 8])):  # another shape; the same with other weights
            other = harness.tiny_model(folder / f"{name}-base", *shape)
            prl("trainer", "--model.name", other, "--model.seq-len", 64, "--data.fake", "--max-steps", 1, "--ckpt",
                "--ckpt.weights.save-adapter-separately", "--model.lora.rank", 4, "--output-dir", folder / name)
        faults = [(folder / "nowhere", 404, ("nowhere", "adapter_config.json")),
                  (folder / "other/weights/step_1/lora_adapters", 400, ("another model", "[64, rank]")),
                  (folder / "stranger/weights/step_1/lora_adapters", 400, ("trained on another base model", "checksum")),
                  (train_adapter(folder, "large", 32, 3), 400, ("rank 32", "max_lora_rank")),
                  (broken("dora", lambda place: edit(place, use_dora=True)), 501, ("DoRA",)),
                  (broken("nan", lambda place: overwrite(place, -4, struct.pack("<f", float("nan")))), 400, ("adapter_model.safetensors",)),
                  (broken("short", truncate), 400, ("adapter_model.safetensors",)),
                  (broken("ranks", lambda place: edit(place, r=2)), 400, ("rank",)),
                  (broken("empty", lambda place: (place / "adapter_model.safetensors").unlink()), 404, ("adapter_model.safetensors",))]
        with server(folder, "--max-loras", 1, "--max-cpu-loras", 1) as port:
            base = complete(port, "tiny")
            check(load(port, "good", good)[0] == 200, "a good adapter is refused")
            own = complete(port, "good")
            for path, status, words in faults:
                for name in ("bad", "good"):
                    got, body = load(port, name, path, "/load_lora_adapter")
                    check(got >= 400, f"{path.name} is served: {body}")
                    refused((got, body), status, *words)
            refused(load(port, "tiny", good), 400, "the model itself")
            refused(load(port, "", good), 400, "lora_name")
            refused(request(port, "POST", "/v1/load_lora_adapter", {"lora_name": "x"}), 400, "lora_path")
            store = {"lora_name": "x", "store": "tcp://127.0.0.1:1"}
            refused(request(port, "POST", "/load_lora_adapter", store), 400, "version")
            refused(request(port, "POST", "/load_lora_adapter", {**store, "version": 1, "lora_path": str(good)}), 400, "store", "both")
            refused(request(port, "POST", "/load_lora_adapter", {**store, "version": 1, "store": str(good)}), 400, "store", "tcp://")
            check(complete(port, "good") == own and complete(port, "tiny") == base, "a refused adapter changed what is served")
            # One place in memory: the other adapter is read again when it is named, and says so when its folder is gone.
            moved = folder / "moved"
            shutil.copytree(good, moved)
            check(load(port, "moved", moved)[0] == 200 and complete(port, "moved") == own, "no second adapter")
            check(complete(port, "good") == own, "an adapter did not come back")
            shutil.rmtree(moved)
            refused(request(port, "POST", "/v1/completions", {"model": "moved", "prompt": "a"}), 404, "moved")
            check(complete(port, "good") == own and complete(port, "tiny") == base, "the server does not serve on")
    with harness.workspace("lora-off") as folder:
        with server(folder, "--no-enable-lora") as port:
            refused(load(port, "x", folder), 400, "enable_lora")


if __name__ == "__main__":
    harness.main(test_one_process_and_several_learn_the_same_adapter, test_an_adapter_in_float32_beside_a_base_in_bfloat16,
                 test_an_adapter_from_the_trainers_memory_is_that_of_files, test_roles_that_were_started_apart_and_an_engine_that_is_lost,
                 test_a_rank_that_takes_over_sends_the_adapter,
                 test_what_cannot_be_adapted_is_refused_before_the_run,
                 test_sft_trains_an_adapter_and_convert_merges_it, test_a_server_takes_adapters_by_name, test_runs_share_a_server_as_their_weights, test_adapters_that_cannot_be_served_are_refused_by_name)
