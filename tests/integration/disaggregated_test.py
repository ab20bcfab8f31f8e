#!/usr/bin/env python3
"""Prefill and decode engines behind one address give what one engine gives: tokens, log-probabilities and experts, bit for bit; with prefixes
that are there already, after new weights, and while engines are killed."""
import contextlib
import os
import random
import re
import signal
import threading

import harness
from harness import check

BLOCK = 16


def prompt(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(8, 250) for _ in range(length)]


def ask(port, ids, seed=1, tokens=12, **more):
    body = {"token_ids": ids, "sampling_params": {"seed": seed, "temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}, **more}
    status, reply = harness.request(port, "POST", "/inference/v1/generate", body)
    check(status == 200, f"status {status}: {reply}")
    choice = reply["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["routed_experts"]["data"], choice["policy_versions"]


def counter(port, name):
    text = harness.request(port, "GET", "/metrics")[1]
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    check(found, f"no {name} on the page of metrics of port {port}")
    return float(found[1])


@contextlib.contextmanager
def both(folder, *flags):
    """One engine, and a prefill and a decode engine of the same model: ports of the one, of the router, of the two; the pids by name."""
    model = harness.tiny_model(folder / "model", "--family", "qwen3_moe", "--num-experts", 4, "--num-experts-per-tok", 2)
    alone, front, prefill, decode = harness.free_ports(4)
    common = ["--model.name", model, "--compute.device", "cpu", "--compute.num-threads", 1, "--enable-return-routed-experts", "--kv.block-size", BLOCK]
    log = folder / "pd.log"
    with harness.running("inference", *common, "--server.port", alone, "--output-dir", folder / "one", log=folder / "one.log"), \
         harness.running("inference", *common, "--server.port", front, "--output-dir", folder / "pd", "--deployment.type", "disaggregated",
                         "--deployment.prefill-port", prefill, "--deployment.decode-port", decode, "--kv-transfer.port", 0, *flags, log=log):
        def are_ready():
            return harness.is_healthy(alone) and sum(state == "ready" for state in states(front)) == 2
        harness.wait_until(are_ready, 30, "the engines")
        yield alone, front, prefill, decode, log


def states(front, key=None):
    try:
        return [engine["state"] for engine in harness.request(front, "GET", "/engines", headers=key, timeout=5)[1]["engines"]]
    except OSError:
        return []


def same(alone, front, ids, **more):
    wanted, found = ask(alone, ids, **more), ask(front, ids, **more)
    for name, a, b in zip(("tokens", "log-probabilities", "experts", "versions"), wanted, found):
        check(a == b, f"{len(ids)} tokens: {name} differ: one engine {str(a)[:200]}, two {str(b)[:200]}")


def test_two_engines_give_what_one_gives():
    with harness.workspace("disaggregated") as folder, both(folder) as (alone, front, prefill, decode, log):
        long = prompt(1, 700)
        same(alone, front, long)
        check(counter(decode, "prl:kv_transfers_total") == 1, "no blocks were sent")
        check(counter(decode, "prl:kv_transfer_blocks_total") == counter(prefill, "prl:kv_given_blocks_total") == (len(long) - 1) // BLOCK,
              "not all whole blocks of the prompt were sent")
        check(counter(front, "prl_router:prefills_total") == 1, "the prefill engine was not asked")
        # What the decode engine has, and what is short, is not asked of the prefill engine.
        same(alone, front, long, seed=2)
        same(alone, front, prompt(2, BLOCK))
        check(counter(front, "prl_router:prefills_total") == 1 and counter(front, "prl_router:prefills_skipped_total") == 2, "a prefill too many")
        # A prefix that is there is not sent again.
        same(alone, front, long[:640] + prompt(3, 200))
        check(counter(decode, "prl:kv_transfer_blocks_total") == (len(long) - 1) // BLOCK + 839 // BLOCK - 640 // BLOCK, "more blocks than are missing")
        streams(alone, front)
        # New weights: blocks of the former ones are of no use to anybody.
        other = harness.tiny_model(folder / "other", "--family", "qwen3_moe", "--num-experts", 4, "--num-experts-per-tok", 2, "--overwrite", "--seed", 9)
        for port in (alone, front):
            status, reply = harness.request(port, "POST", "/update_weights", {"weight_dir": str(other), "version": 1})
            check(status == 200, f"weights were not taken: {reply}")
        before = counter(front, "prl_router:prefills_total")
        same(alone, front, long)
        check(counter(front, "prl_router:prefills_total") == before + 1, "a prompt of former weights was found")
        check(counter(decode, "prl:kv_transfer_fallbacks_total") == 0, f"a transfer failed: {log.read_text()[-2000:]}")
        deaths(alone, front, decode, log)


def streams(alone, front):
    """A streamed chat has the same text."""
    body = {"messages": [{"role": "user", "content": "abcd " * 60}], "max_tokens": 8, "seed": 5, "temperature": 1.0, "ignore_eos": True, "stream": True}
    texts = []
    for port in (alone, front):
        status, text = harness.request(port, "POST", "/v1/chat/completions", body)
        check(status == 200 and "[DONE]" in text, f"status {status}: {text[-500:]}")
        texts.append(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', text))
    check(texts[0] == texts[1], f"streams differ: {texts}")


def deaths(alone, front, decode, log):
    """A prefill engine that is killed costs no request and no bit, nor does a decode engine."""
    wanted = [ask(alone, prompt(seed, 600), tokens=40) for seed in range(10, 16)]
    found, problems = {}, []

    def ask_one(seed):
        try:
            found[seed] = ask(front, prompt(seed, 600), tokens=40)
        except (OSError, harness.Failure) as error:
            problems.append(f"{seed}: {error}")
    for name in ("engine_0", "engine_1"):
        threads = [threading.Thread(target=ask_one, args=(seed,)) for seed in (range(10, 13) if name == "engine_0" else range(13, 16))]
        for thread in threads[:1]:
            thread.start()
        os.kill(harness.role_pids(log)[name], signal.SIGKILL)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        harness.wait_until(lambda: states(front).count("ready") == 2, 30, f"{name} to be back")
    check(not problems, f"requests failed: {problems}")
    check([found[seed] for seed in sorted(found)] == wanted, "an engine's death changed a reply")
    before = counter(front, "prl_router:prefills_total")
    same(alone, front, prompt(20, 500))
    check(counter(front, "prl_router:prefills_total") == before + 1, "the prefill engine that came back is not asked")


def test_a_run_has_the_weights_of_a_run_with_one_engine():
    with harness.workspace("disaggregated-run") as folder:
        def run(name, *flags):
            config = harness.rl_config(folder / f"{name}.toml", harness.warm_model(), max_async_level=0, max_steps=3)
            harness.prl("rl", "@", config, "--output-dir", folder / name, "--ckpt", "--deployment.type", "single_node", "--compute.device", "cpu",
                        "--no-dashboard", "--inference.server.port", harness.free_port(), "--inference.kv.block-size", 4, *flags)
            return harness.digest(folder / name / "weights/step_3", "*.safetensors")
        split = ["--inference.deployment.type", "disaggregated", "--inference.deployment.non-cached-tokens", 4, "--inference.kv-transfer.port", 0]
        check(run("one") == run("two", *split), "a prefill and a decode engine gave other weights than one engine")
        proofs = harness.rows_of(folder / "two/logs/weight_proofs.jsonl")
        check(len({line["engine"] for line in proofs}) == 2 and all(line["is_proven"] for line in proofs), f"not both proved their weights: {proofs}")
        text = (folder / "two/logs/latest/inference_1.log").read_text()
        found = re.search(r"key-value blocks: (\d+) came for (\d+) prompts in [0-9.]+ s, (\d+) of which were completed here", text)
        check(found and int(found[2]) > 0 and int(found[3]) == 0, f"blocks did not come: {text[-1000:]}")


def test_prefill_and_decode_engines_on_two_nodes():
    with harness.workspace("disaggregated-nodes") as folder:
        model = harness.tiny_model(folder / "model")
        front, prefill, decode, meeting = harness.free_ports(4)
        key = {"Authorization": "Bearer k"}
        config = folder / "infer.toml"
        config.write_text(f"""
output_dir = "{folder}/out"
[model]
name = "{model}"
[server]
port = {front}
api_key = "k"
[compute]
device = "cpu"
num_threads = 1
[kv_transfer]
port = 0
[deployment]
type = "disaggregated"
gpus_per_node = 1
prefill_port = {prefill}
decode_port = {decode}
""")
        harness.prl("inference", "@", config, "--slurm.job-name", "pd", "--deployment.num-decode-replicas", 2, "--output-dir", folder / "job", "--dry-run")
        check("#SBATCH --nodes=3" in (folder / "job/pd.sbatch").read_text(), "the job has other nodes than three")
        with contextlib.ExitStack() as stack:
            for rank in (0, 1):
                stack.enter_context(harness.running("launch", "--node-rank", rank, "--rdzv-endpoint", f"127.0.0.1:{meeting}", "inference", "@", config,
                                                    log=folder / f"node_{rank}.log"))
            harness.wait_until(lambda: states(front, key).count("ready") == 2, 30, "the engines of two nodes")
            body = {"prompt": prompt(1, 240), "max_tokens": 3, "seed": 1}
            status, reply = harness.request(front, "POST", "/v1/completions", body, headers=key)
            check(status == 200 and reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 224, f"status {status}: {reply}")
            check(counter(decode, "prl:kv_transfers_total") == 1, "no blocks were sent")


harness.main(test_two_engines_give_what_one_gives, test_a_run_has_the_weights_of_a_run_with_one_engine, test_prefill_and_decode_engines_on_two_nodes)
