#!/usr/bin/env python3
"""A mixture of experts (qwen3_moe) from nothing to a server: fine-tuning, RL and serving give the bits of one process however they are divided."""
import base64
import json
import os
import signal

import harness
from harness import check, prl

STEPS = 6
EXPERTS = ["--family", "qwen3_moe", "--num-experts", 8, "--num-experts-per-tok", 2, "--moe-intermediate-size", 48, "--num-kv-heads", 4]
os.environ["CUDA_VISIBLE_DEVICES"] = ""


def weights(out, step=STEPS):
    return harness.tensor_digest(out / f"weights/step_{step}")


def tensor_names(path):
    data = path.read_bytes()
    return set(json.loads(data[8:8 + int.from_bytes(data[:8], "little")]))


def prepare(folder):
    harness.tiny_model(folder / "model", *EXPERTS)
    harness.sft_data(folder / "data.jsonl", 256)


def fine_tune(folder, out, *flags, steps=STEPS):
    prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
        "--max-steps", steps, "--optim.lr", "5e-3", "--output-dir", folder / out, "--ckpt", *flags)
    return weights(folder / out, steps)


def test_fine_tuning_gives_the_weights_of_one_rank():
    with harness.workspace("moe-sft") as folder:
        prepare(folder)
        for dtype in ("float32", "bfloat16"):
            of_dtype = ["--compute.dtype", dtype]
            one = fine_tune(folder, f"{dtype}-1", *of_dtype)
            ways = {"recomputed": ["--model.ac"], "some-recomputed": ["--model.ac.mode", "selective", "--model.ac.targets", "norm,routed_experts"],
                    "two-ranks": ["--deployment.num-gpus", 2], "gathered": ["--deployment.num-gpus", 2, "--model.reshard-after-forward"],
                    "divided": ["--deployment.num-gpus", 3, "--model.ep", 3],
                    "divided-recomputed": ["--deployment.num-gpus", 2, "--model.ep", 2, "--model.ac.mode", "selective", "--model.ac.targets",
                                           "norm,routed_experts"]}
            for name, flags in ways.items():
                check(fine_tune(folder, f"{dtype}-{name}", *of_dtype, *flags) == one, f"{dtype}, {name}: other weights than one rank")
            leaves = ["--model.cp-style", "ulysses", "--model.leaves-per-row", 4]
            four = fine_tune(folder, f"{dtype}-leaves", *of_dtype, *leaves)
            check(four != one, "four leaves gave the bits of one: the key does nothing")
            shared = fine_tune(folder, f"{dtype}-shared", *of_dtype, *leaves, "--model.cp", 2, "--deployment.num-gpus", 2)
            check(shared == four, f"{dtype}: rows that ranks share gave other weights")
        rows = harness.metrics(folder / "float32-1")
        check(all(0 <= rows[step]["max_vio/mean"] < 8 and 0 < rows[step]["routing_confidence/mean"] <= 1 for step in range(1, STEPS + 1)),
              f"how experts are used: {rows[STEPS]}")
        # A run that goes on where another has ended.
        fine_tune(folder, "resumed", "--compute.dtype", "float32", steps=3)
        check(fine_tune(folder, "resumed", "--compute.dtype", "float32", "--ckpt.resume-step", -1) == weights(folder / "float32-1"),
              "a resumed run has other weights")


def tensors(folder):
    """Name -> bytes of the tensors of a folder with one file."""
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return {name: data[end + at["data_offsets"][0]:end + at["data_offsets"][1]] for name, at in json.loads(data[8:end]).items() if name != "__metadata__"}


def test_frozen_routers_stay():
    with harness.workspace("moe-frozen") as folder:
        prepare(folder)
        flags = ["--compute.dtype", "float32", "--model.freeze-moe-router", "--optim.weight-decay", "0.1"]
        one = fine_tune(folder, "one", *flags)
        for name, more in {"two-ranks": ["--deployment.num-gpus", 2], "recomputed": ["--model.ac"]}.items():
            check(fine_tune(folder, name, *flags, *more) == one, f"{name}: other weights than one rank")
        before, after = tensors(folder / "model"), tensors(folder / f"one/weights/step_{STEPS}")
        routers = {name for name in before if name.endswith("mlp.gate.weight")}
        check(len(routers) == 2, f"the model's routers: {routers}")
        changed = {name for name in before if before[name] != after[name]}
        check(changed == set(before) - routers, f"changed although frozen: {changed & routers}; unchanged: {set(before) - changed - routers}")


def test_rl_gives_the_weights_of_one_process():
    with harness.workspace("moe-rl") as folder:
        prepare(folder)
        fine_tune(folder, "sft", steps=60)
        config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_60", max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        one = weights(folder / "one")
        rows = harness.metrics(folder / "one")
        check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "sampler and trainer disagree")
        check(any(rows[step]["optim/grad_norm"] > 0 for step in range(1, STEPS + 1)), "nothing was trained")
        ports = harness.free_ports(2)
        prl("rl", "@", config, "--output-dir", folder / "several", "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2,
            "--trainer-gpu-ids", "[0, 1]", "--inference-gpu-ids", "[0]", "--inference.server.port", ports[0], "--weight-broadcast.type", "nccl",
            "--weight-broadcast.port", ports[1])
        check(weights(folder / "several") == one, "two trainer ranks and a server gave other weights than one process")
        for name, flags in {"files": [], "senders": ["--weight-broadcast.type", "nccl", "--weight-broadcast.num-senders", 2]}.items():
            ports = harness.free_ports(2)
            more = ["--weight-broadcast.port", ports[1]] if flags else []
            prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", "--deployment.type", "single_node", "--deployment.num-train-gpus", 2,
                "--trainer.model.ep", 2, "--inference.server.port", ports[0], *flags, *more)
            check(weights(folder / name) == one, f"experts divided among two ranks, weights by {name}: other weights than one process")
            rows = harness.metrics(folder / name)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "sampler and trainer disagree")


def test_divided_experts_survive():
    # Ranks that are lost take their experts with them: the others have copies, go on with more of them each, and share them again.
    with harness.workspace("moe-healed") as folder:
        prepare(folder)
        steps = 120
        one = fine_tune(folder, "one", steps=steps)
        log = folder / "run.log"
        with harness.running("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", 4,
                             "--max-steps", steps, "--optim.lr", "5e-3", "--output-dir", folder / "out", "--ckpt", "--deployment.num-gpus", 3, "--model.ep", 3,
                             "--healing.max-restarts", 3, "--healing.backoff-seconds", 0.1, log=log) as run:
            harness.wait_until(lambda: len(harness.rows_of(folder / "out/metrics.jsonl")) > 10 or run.poll() is not None, 120, "steps")
            os.kill(harness.role_pids(log)["sft_rank_2"], signal.SIGKILL)
            harness.wait_until(lambda: "a rank was let in" in log.read_text() or run.poll() is not None, 120, "the rank that was started again")
            check(run.wait(360) == 0, log.read_text()[-3000:])
        check(weights(folder / "out", steps) == one, "the healed run gave other weights")
        # Saved by three that divide experts, continued by one that has all.
        more = steps + 2
        check(fine_tune(folder, "out", "--ckpt.resume-step", -1, steps=more) == fine_tune(folder, "one", "--ckpt.resume-step", -1, steps=more),
              "resumed by one rank: other weights")
        for flags, wanted in ((["--model.ep", 2], "model.ep: 2 ranks cannot divide the experts among 1 trainer rank"),
                              (["--model.ep", 2, "--model.cp", 2, "--deployment.num-gpus", 2], "model.ep"),
                              (["--model.ep", 9, "--deployment.num-gpus", 9], "model.ep: 9 ranks cannot divide 8 experts")):
            answer = prl("sft", "--model.name", folder / "model", "--data.name", folder / "data.jsonl", "--max-steps", 1, "--output-dir", folder / "refused",
                         *flags, expect=1)[1]
            check(wanted in answer, f"{flags}: {answer[-2000:]}")


def test_router_replay():
    """The trainer takes the experts that tokens were sampled with: the bits of its own routers in lock-step, others where weights have moved on."""
    with harness.workspace("moe-replay") as folder:
        prepare(folder)
        fine_tune(folder, "sft", steps=60)
        replay = ["--trainer.enable-router-replay"]
        config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_60", max_async_level=0, max_steps=STEPS)
        prl("rl", "@", config, "--output-dir", folder / "one", "--ckpt")
        one = weights(folder / "one")
        ports = harness.free_ports(4)
        ranks = ["--deployment.type", "single_node", "--deployment.num-train-gpus", 2, "--trainer-gpu-ids", "[0, 1]"]
        several = [*ranks, "--inference-gpu-ids", "[0]"]
        tp = [*ranks, "--inference-gpu-ids", "[0, 1]", "--inference.parallel.tp", 2, "--inference.server.port", ports[1]]
        for name, flags in {"replayed": [], "served": [*several, "--inference.server.port", ports[0]], "tp": tp}.items():
            prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", *replay, *flags)
            check(weights(folder / name) == one, f"{name}: replayed experts gave other weights than the routers in lock-step")
            rows = harness.metrics(folder / name)
            check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), f"{name}: sampler and trainer disagree")
            check(all(0.8 < rows[step]["replayed_tokens"] < 1 for step in range(1, STEPS + 1)), f"{name}: {rows[1]['replayed_tokens']} of all tokens")
        leaves = ["--trainer.model.cp-style", "ulysses", "--trainer.model.leaves-per-row", 4]
        prl("rl", "@", config, "--output-dir", folder / "leaves", "--ckpt", *leaves)
        prl("rl", "@", config, "--output-dir", folder / "cp", "--ckpt", *replay, *leaves, "--trainer.model.cp", 2, *several, "--inference.server.port", ports[2])
        check(weights(folder / "cp") == weights(folder / "leaves"), "ranks that share rows replayed other experts")
        # Two versions behind, the experts of a token may be others than the routers would choose now.
        late = harness.rl_config(folder / "late.toml", folder / "sft/weights/step_60", max_async_level=2, max_steps=STEPS)
        runs = {"late": [], "late-replayed": replay}
        for name, flags in runs.items():
            prl("rl", "@", late, "--output-dir", folder / name, "--ckpt", "--trainer.optim.lr", "1e-3", "--orchestrator.strict-async-level", *flags)
        check(weights(folder / "late") != weights(folder / "late-replayed"), "replay changed nothing although the routers had moved on")


def test_servers_tell_which_experts_tokens_had():
    with harness.workspace("moe-routes") as folder:
        prepare(folder)
        port, log = harness.free_port(), folder / "server.log"
        serve = ["inference", "--model.name", folder / "model", "--model.served-name", "m", "--server.port", port]
        with harness.running(*serve, "--enable-return-routed-experts", log=log) as server:
            harness.wait_until(lambda: harness.is_healthy(port) or server.poll() is not None, 30, "the server")
            prompt = list(range(40, 60))

            def experts(**sampling):
                body = {"model": "m", "token_ids": prompt, "sampling_params": {"max_tokens": 5, "temperature": 0, "ignore_eos": True, **sampling}}
                status, reply = harness.request(port, "POST", "/inference/v1/generate", body)
                check(status == 200, f"{status}: {reply}")
                found = reply["choices"][0]["routed_experts"]
                check(list(found) == ["data", "shape", "start", "dtype"] and found["dtype"] == "uint8", f"{found}")
                return found, base64.b64decode(found["data"])
            found, data = experts()
            check(found["shape"] == [24, 2, 2] and found["start"] == 0 and len(data) == 96, f"{found}")
            check(all(id < 8 for id in data) and all(data[i] != data[i + 1] for i in range(0, 96, 2)), f"no two experts of eight each: {list(data)}")
            later, tail = experts(routed_experts_prompt_start=17)
            check(later["shape"] == [7, 2, 2] and later["start"] == 17 and tail == data[68:], "other experts from a later token on")
            body = {"model": "m", "token_ids": prompt, "sampling_params": {"routed_experts_prompt_start": 21}}
            status, reply = harness.request(port, "POST", "/inference/v1/generate", body)
            check(status == 400 and "routed_experts_prompt_start" in json.dumps(reply), f"{status}: {reply}")
        harness.tiny_model(folder / "dense")
        for command in (["inference", "--model.name", folder / "dense", "--enable-return-routed-experts", "--server.port", port],
                        ["trainer", "--model.name", folder / "dense", "--enable-router-replay", "--data.fake", "--output-dir", folder / "out"]):
            said = "".join(prl(*command, expect=None))
            check("has no experts" in said or "has no routers" in said, f"a dense model was taken: {said[-500:]}")


def test_adapters_of_experts():
    with harness.workspace("moe-lora") as folder:
        prepare(folder)
        lora = ["--model.lora.rank", 4, "--model.lora.alpha", 16, "--optim.lr", "2e-2"]
        one = fine_tune(folder, "one", *lora, "--ckpt.weights.save-adapter-separately")
        check(fine_tune(folder, "two", *lora, "--deployment.num-gpus", 2) == one, "two ranks trained another adapter than one")
        check(fine_tune(folder, "again", *lora, "--model.ac") == one, "recomputed layers gave another adapter")
        leaves = ["--model.cp-style", "ulysses", "--model.leaves-per-row", 4]
        check(fine_tune(folder, "shared", *lora, *leaves, "--model.cp", 2, "--deployment.num-gpus", 2) == fine_tune(folder, "leaves", *lora, *leaves),
              "ranks that share rows trained another adapter")
        tensors = tensor_names(next((folder / "one").rglob("adapter_model.safetensors")))
        check("base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_B.weight" in tensors, f"the adapter's tensors: {sorted(tensors)[:8]}")
        fine_tune(folder, "sft", steps=60)
        config = harness.rl_config(folder / "rl.toml", folder / "sft/weights/step_60", max_async_level=0, max_steps=STEPS)
        adapter = ["--trainer.model.lora.rank", 4]
        prl("rl", "@", config, "--output-dir", folder / "rl", "--ckpt", *adapter)
        rows = harness.metrics(folder / "rl")
        check(all(rows[step]["mismatch_kl/all/max"] == 0 for step in range(1, STEPS + 1)), "sampler and trainer disagree about an adapter of experts")
        check(any(rows[step]["optim/grad_norm"] > 0 for step in range(1, STEPS + 1)), "nothing was trained")
        ports = harness.free_ports(1)
        prl("rl", "@", config, "--output-dir", folder / "several", "--ckpt", *adapter, "--deployment.type", "single_node", "--inference.server.port", ports[0])
        check(weights(folder / "several") == weights(folder / "rl"), "a server gave another adapter than one process")


def test_serves_and_converts():
    with harness.workspace("moe-served") as folder:
        prepare(folder)
        body = {"model": "m", "prompt": list(range(40, 90)), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        answers = []
        for chunk in (256, 16):
            port, log = harness.free_port(), folder / f"server-{chunk}.log"
            with harness.running("inference", "--model.name", folder / "model", "--model.served-name", "m", "--server.port", port,
                                 "--max-num-batched-tokens", chunk, "--max-num-seqs", 8, log=log) as server:
                harness.wait_until(lambda: harness.is_healthy(port) or server.poll() is not None, 30, "the server")
                check(server.poll() is None, log.read_text()[-2000:])
                status, reply = harness.request(port, "POST", "/v1/completions", body)
                check(status == 200, f"{status}: {reply}")
                choice = reply["choices"][0]
                answers.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        check(answers[0] == answers[1], f"a prompt in pieces gave other tokens or log-probabilities: {answers}")
        prl("convert", folder / "model", folder / "half", "--dtype", "bfloat16")
        kept = json.loads((folder / "half/config.json").read_text())
        check(kept["model_type"] == "qwen3_moe" and kept["num_experts"] == 8 and kept["norm_topk_prob"] is True, f"config.json: {kept}")


if __name__ == "__main__":
    harness.main(test_fine_tuning_gives_the_weights_of_one_rank, test_frozen_routers_stay, test_rl_gives_the_weights_of_one_process, test_divided_experts_survive, test_router_replay,
                 test_servers_tell_which_experts_tokens_had, test_adapters_of_experts, test_serves_and_converts)
