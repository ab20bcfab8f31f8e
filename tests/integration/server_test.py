#!/usr/bin/env python3
"""`prl inference` over HTTP: refusals, keys, limits, pauses, weight updates, clients that leave, and many connections."""
import asyncio
import concurrent.futures
import contextlib
import json
import pathlib
import resource
import shutil
import socket
import time

import harness
from harness import check, prl, request


@contextlib.contextmanager
def server(*flags):
    """A server on the warm model; (port, process)."""
    with harness.workspace("server") as folder:
        log = folder / "inference.log"
        port = harness.free_port()
        with harness.running("inference", "--model.name", harness.warm_model(), "--model.served-name", "tiny", "--server.port", port,
                             "--model.max-model-len", 512, *flags, log=log) as process:
            harness.wait_until(lambda: harness.is_healthy(port) or process.poll() is not None, 30, "the server")
            check(process.poll() is None, f"the server ended: {log.read_text()[-2000:]}")
            yield port, process
            check(process.poll() is None, f"the server ended during the test: {log.read_text()[-2000:]}")


def complete(port, headers=None, timeout=60, **fields):
    return request(port, "POST", "/v1/completions", {"model": "tiny", "prompt": "ab", "max_tokens": 4, **fields}, headers, timeout)


def metric(port, name, having=""):
    _, text = request(port, "GET", "/metrics")
    for line in text.splitlines():
        if line.startswith(name + "{") and having in line:
            return float(line.rsplit(" ", 1)[1])
    raise harness.Failure(f"/metrics has no {name} {having}")


def error_of(answer, status, *words):
    """Checks that an answer is an error of the OpenAI shape that holds `words`."""
    got, body = answer
    check(got == status, f"status {got}, wanted {status}: {body}")
    check(isinstance(body, dict) and "error" in body, f"no error object: {body}")
    for word in words:
        check(word in json.dumps(body["error"]), f"the error does not speak of {word!r}: {body}")
    return body["error"]


def test_bad_requests_are_refused_by_name():
    with server("--server.max-body-bytes", 4096) as (port, _):
        error_of(request(port, "POST", "/v1/completions", b'{"model": "tiny", "prompt": '), 400, "JSON")
        error_of(request(port, "POST", "/v1/completions", b"\xff\xfe"), 400)
        error_of(request(port, "POST", "/v1/completions", b"[1]"), 400)
        error_of(complete(port, prompt="x" * 5000), 413, "4096")
        error_of(complete(port, model="other"), 404, "other")
        error_of(request(port, "GET", "/v1/nothing"), 404, "/v1/nothing")
        error_of(request(port, "GET", "/v1/completions"), 405)
        check(error_of(complete(port, temperature="hot"), 400, "temperature")["param"] == "temperature", "param is not the field")
        check(error_of(complete(port, max_tokens=-1), 400)["param"] == "max_tokens", "param is not the field")
        error_of(complete(port, n=0), 400, "n")
        error_of(complete(port, prompt=[1, 999999]), 400)
        error = error_of(complete(port, prompt="x" * 2000), 400, "This model's maximum context length is")
        check(error["message"].startswith("This model's maximum context length is"), f"{error}")
        error_of(request(port, "POST", "/v1/chat/completions", {"model": "tiny"}), 400, "messages")
        error_of(request(port, "POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"content": "x"}]}), 400, "role")
        error_of(request(port, "POST", "/update_weights", {"weight_dir": "/nowhere"}), 404, "/nowhere")
        error_of(request(port, "POST", "/update_weights", {}), 400, "weight_dir")
        status, body = complete(port)
        check(status == 200 and body["choices"][0]["finish_reason"] in ("stop", "length"), f"{status} {body}")


def test_keys_guard_their_routes():
    with server("--server.api-key", "user-key", "--server.admin-api-key", "admin-key") as (port, _):
        user, admin = {"Authorization": "Bearer user-key"}, {"Authorization": "Bearer admin-key"}
        error_of(complete(port), 401)
        error_of(complete(port, {"Authorization": "Bearer user-keyX"}), 401)
        error_of(request(port, "GET", "/v1/models"), 401)
        check(complete(port, user)[0] == 200, "the right key is refused")
        check(complete(port, {"x-api-key": "user-key"})[0] == 200, "the key as x-api-key is refused")
        error_of(request(port, "POST", "/pause", None, user), 403)
        error_of(request(port, "POST", "/update_weights", {"weight_dir": "/x"}), 401)
        check(request(port, "POST", "/pause", None, admin)[0] == 200, "the administrator's key is refused")
        check(request(port, "POST", "/resume", None, admin)[0] == 200, "the administrator's key is refused")
        check(request(port, "GET", "/health")[0] == 200 and request(port, "GET", "/metrics")[0] == 200, "health needs a key")


def test_a_full_queue_answers_429():
    with server("--server.max-queued-requests", 4, "--max-num-seqs", 2) as (port, _):
        check(request(port, "POST", "/pause")[0] == 200, "no pause")
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(complete, port) for _ in range(12)]
            harness.wait_until(lambda: sum(one.done() for one in waiting) >= 6, 20, "refusals")
            for one in waiting:
                if one.done():
                    error_of(one.result(), 429, "may wait")
            check(request(port, "POST", "/resume")[0] == 200, "no resume")
            statuses = sorted(one.result()[0] for one in waiting)
        check(statuses.count(200) >= 4 and set(statuses) == {200, 429}, f"{statuses}")
        check(complete(port)[0] == 200, "the queue stays full")


def test_requests_are_held_during_a_pause_and_an_update():
    with server() as (port, _):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for _ in range(10):  # the request may have ended before the pause began
                tokens = metric(port, "vllm:generation_tokens_total")
                long = pool.submit(complete, port, max_tokens=500, n=32, ignore_eos=True)
                harness.wait_until(lambda: metric(port, "vllm:generation_tokens_total") > tokens or long.done(), 20, "tokens", 0.002)
                check(request(port, "POST", "/pause")[0] == 200, "no pause")
                time.sleep(0.3)  # time in which its reply arrives, or a request that is not held would end
                if not long.done():
                    break
                check(request(port, "POST", "/resume")[0] == 200, "no resume")
            check(not long.done(), "ten requests of 32 times 500 tokens went on during ten pauses")
            new = pool.submit(complete, port)
            tokens = metric(port, "vllm:generation_tokens_total")
            status, proof = request(port, "POST", "/update_weights", {"weight_dir": str(harness.warm_model()), "version": 7})
            check(status == 200 and proof["policy_version"] == 7 and len(proof["checksum"]) == 16, f"{status} {proof}")
            time.sleep(0.3)  # time in which a request that is not held would end
            check(not long.done() and not new.done(), "a request went on during the pause")
            check(metric(port, "vllm:generation_tokens_total") == tokens, "tokens were generated during the pause")
            check(metric(port, "prl:engine_paused") == 1, "the metrics do not say that the engine is paused")
            check(request(port, "POST", "/resume")[0] == 200, "no resume")
            status, body = long.result(60)
            check(status == 200 and body["policy_version"] == {"start": 0, "end": 7}, f"{status} {body.get('policy_version')}")
            check(body["usage"]["completion_tokens"] == 32 * 500, f"{body['usage']}")
            status, body = new.result(60)
            check(status == 200 and body["policy_version"] == {"start": 7, "end": 7}, f"{status} {body.get('policy_version')}")
        with harness.workspace("broken") as folder:
            broken = folder / "step_8"
            shutil.copytree(harness.warm_model(), broken)
            (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1000])
            answer = request(port, "POST", "/update_weights", {"weight_dir": str(broken)})
            check(answer[0] >= 400 and "model.safetensors" in json.dumps(answer[1]), f"{answer}")
        status, body = complete(port)
        check(status == 200 and body["policy_version"]["end"] == 7, f"after a failed update: {status} {body}")


def test_an_override_of_the_rotary_scaling_serves_longer_texts_and_takes_no_trainers_weights():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    with harness.workspace("rope") as folder:
        model = harness.tiny_model(folder / "model", "--max-position-embeddings", 128)
        written = folder / "written"
        shutil.copytree(model, written)
        config = json.loads((written / "config.json").read_text())
        (written / "config.json").write_text(json.dumps({**config, "rope_scaling": yarn, "max_position_embeddings": 512}))
        answers, prompt = [], "abcd" * 60  # more than the 128 tokens that the model has by itself
        for name, flags in ((model, ["--model.rope-scaling", json.dumps(yarn)]), (written, [])):
            port = harness.free_port()
            with harness.running("inference", "--model.name", name, "--server.port", port, "--compute.device", "cpu", "--output-dir", folder / "out", *flags,
                                 log=folder / "log") as process:
                harness.wait_until(lambda: harness.is_healthy(port) or process.poll() is not None, 60, "the server")
                body = {"model": str(name), "prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 1, "ignore_eos": True}
                status, reply = request(port, "POST", "/v1/completions", body)
                check(status == 200 and reply["usage"]["prompt_tokens"] > 128, f"{status} {reply}")
                answers.append((reply["choices"][0]["text"], reply["choices"][0]["logprobs"]))
                status, reply = request(port, "POST", "/update_weights", {"weight_dir": str(written), "version": 1})
                if flags:
                    check(status == 400 and "model.rope_scaling" in json.dumps(reply), f"{status} {reply}")
                    check(request(port, "POST", "/reload_weights")[0] == 200, "its own weights are refused")
                else:
                    check(status == 200, f"{status} {reply}")
        check(answers[0] == answers[1], "the override is another model than a file that says the same")


def test_a_client_that_leaves_cancels_its_request():
    with server() as (port, _):
        for fields in ({}, {"stream": True}):
            aborted = metric(port, "vllm:request_success_total", "abort")
            check(request(port, "POST", "/pause")[0] == 200, "no pause")
            body = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 400, "ignore_eos": True, "n": 3, **fields}).encode()
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(body) + body)
                harness.wait_until(lambda: metric(port, "vllm:num_requests_waiting") == 3, 10, "three requests to wait")
            check(request(port, "POST", "/resume")[0] == 200, "no resume")
            harness.wait_until(lambda: metric(port, "vllm:request_success_total", "abort") == aborted + 3, 10, "three cancellations")
            check(metric(port, "vllm:num_requests_running") + metric(port, "vllm:num_requests_waiting") == 0, "they still run")


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, stderr = prl("inference", "--model.name", harness.warm_model(), "--server.port", port, expect=1)
        check(f"127.0.0.1:{port}" in stderr, f"the message does not name the address: {stderr}")


def test_its_lines_are_kept_in_a_file():
    with harness.workspace("server-log") as folder:
        port = harness.free_port()
        command = ["inference", "--model.name", harness.warm_model(), "--server.port", port, "--output-dir", folder / "out"]
        with harness.running(*command, log=folder / "printed"):
            harness.wait_until(lambda: harness.is_healthy(port), 30, "the server")
            printed, kept = (folder / "printed").read_text(), (folder / "out/logs/latest/inference.log").read_text()
            check(f":{port}/v1 after" in kept and kept == printed, f"printed: {printed} kept: {kept}")
        with harness.running(*command, "--log.file", "false", "--output-dir", folder / "none", log=folder / "printed"):
            harness.wait_until(lambda: harness.is_healthy(port), 30, "the server")
            check(not (folder / "none").exists(), "it writes a log although log.file is false")
        (folder / "taken").write_text("")
        _, stderr = prl(*command, "--output-dir", folder / "taken", expect=1)
        check("log.file" in stderr and "taken/logs" in stderr, stderr)


async def ask_all(port, count):
    """`count` connections, all open before the first request is sent; their status lines."""
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 8, "ignore_eos": True, "seed": 1}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n").encode()
    streams = []
    for _ in range(count):
        streams.append(await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 20))

    async def ask(reader, writer):
        writer.write(head + body)
        await writer.drain()
        reply = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return reply.split(b"\r\n", 1)[0].decode()

    return await asyncio.gather(*(ask(*stream) for stream in streams))


def memory_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise harness.Failure("no VmRSS")


def test_a_thousand_connections_with_32_running():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with server("--max-num-seqs", 32) as (port, process):
        asyncio.run(ask_all(port, 50))
        before = memory_mib(process.pid)
        began = time.monotonic()
        for round_number in range(2):
            statuses = asyncio.run(ask_all(port, 1000))
            check(all(status.startswith("HTTP/1.1 200") for status in statuses), f"{set(statuses)}")
            growth = memory_mib(process.pid) - before
            print(f"      round {round_number}: {time.monotonic() - began:.1f} s, {growth:.0f} MiB more than before")
            check(growth < 150, f"1,000 connections cost {growth:.0f} MiB")
        harness.wait_until(lambda: metric(port, "prl:http_connections") <= 1, 10, "the connections to close")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_blocks_without_room_in_the_cache_come_back_from_host_memory():
    prompts = ["".join(chr(ord("a") + (i * i + first) % 26) for i in range(400)) for first in range(2)]
    answers = {}
    for flags in ([], ["--kv-cache-offload.type", "native", "--kv-cache-offload.cpu.num-bytes", 64 << 20]):
        with server("--kv.num-blocks", 33, "--kv.block-size", 16, *flags) as (port, _):
            mine = []
            for prompt in prompts * 3:  # either prompt evicts the other
                status, body = complete(port, prompt=prompt, seed=5, temperature=1.0, logprobs=2)
                check(status == 200, f"{status} {body}")
                mine.append((body["choices"][0]["text"], body["choices"][0]["logprobs"]))
            answers[bool(flags)] = mine
            hits = metric(port, "vllm:prefix_cache_hits_total")
            if not flags:
                check("external_prefix_cache_hits" not in request(port, "GET", "/metrics")[1], "host memory is counted without the key")
                continue
            from_host = metric(port, "vllm:external_prefix_cache_hits_total")
            check(from_host >= 4 * 200 and hits >= from_host, f"{from_host} tokens of {hits} came from host memory")
            check(metric(port, "prl:kv_blocks_restored_total") == from_host / 16, "restored blocks and the tokens they hold differ")
            check(0 < metric(port, "prl:kv_host_blocks_used") <= metric(port, "prl:kv_host_blocks"), "no block in host memory can be found")
            check(request(port, "POST", "/reset_prefix_cache")[0] == 200, "no reset")
            complete(port, prompt=prompts[0])
            check(metric(port, "vllm:external_prefix_cache_hits_total") == from_host, "a block survived the reset")
    check(answers[True] == answers[False], "blocks from host memory change an answer")
    with harness.workspace("offload") as folder:
        out, errors = prl("inference", "--model.name", harness.warm_model(), "--model.max-model-len", 512, "--server.port", harness.free_port(),
                          "--kv-cache-offload.type", "native", "--kv-cache-offload.cpu.num-bytes", 100, cwd=folder, expect=None, timeout=60)
    check("kv_cache_offload.cpu.num_bytes" in out + errors and "found 100" in out + errors, f"{out[-500:]} {errors[-500:]}")


def test_blocks_without_room_in_host_memory_come_back_from_files_and_no_file_is_left():
    prompts = ["".join(chr(ord("a") + (i * i + first) % 26) for i in range(400)) for first in range(3)]

    def answers(port):
        mine = []
        for prompt in prompts * 3:  # 25 blocks each
            status, body = complete(port, prompt=prompt, seed=5, temperature=1.0, logprobs=2)
            check(status == 200, f"{status} {body}")
            mine.append((body["choices"][0]["text"], body["choices"][0]["logprobs"]))
        return mine

    cache = ["--kv.num-blocks", 33, "--kv.block-size", 16, "--kv-cache-offload.type", "native", "--kv-cache-offload.cpu.num-bytes"]
    with server(*cache, 64 << 20) as (port, _):
        wanted = answers(port)
        block_bytes = (64 << 20) // int(metric(port, "prl:kv_host_blocks"))
        check("kv_disk" not in request(port, "GET", "/metrics")[1], "files are counted without the key")
    with harness.workspace("kv-files") as folder:
        files = [*cache, 60 * block_bytes, "--kv-cache-offload.disk.path", folder / "kv", "--kv-cache-offload.disk.read-timeout", 30]
        with server(*files) as (port, process):
            check(answers(port) == wanted, "blocks from files change an answer")
            hits, used = metric(port, "prl:kv_disk_hits_total"), metric(port, "prl:kv_disk_blocks_used")
            check(0 < hits <= metric(port, "vllm:external_prefix_cache_hits_total") and used > 0, f"{hits} tokens came from files, which hold {used} blocks")
            check(metric(port, "prl:kv_disk_damaged_total") == 0 and metric(port, "prl:kv_disk_off") == 0, "the file is damaged")
            left = list((folder / "kv").iterdir())
            check(len(left) == 1 and left[0].stat().st_mode & 0o777 == 0o600, f"{left}")
        check(not list((folder / "kv").iterdir()), "a server that was stopped has left its file")
        log, port = folder / "killed.log", harness.free_port()
        with harness.running("inference", "--model.name", harness.warm_model(), "--model.max-model-len", 512, "--server.port", port, *files, log=log) as killed:
            harness.wait_until(lambda: harness.is_healthy(port) or killed.poll() is not None, 30, "the server")
            killed.kill()
            killed.wait(10)
        left = list((folder / "kv").iterdir())
        check(len(left) == 1, f"a server that was killed: {left}")
        (folder / "kv/notes.txt").write_text("of somebody else")
        with server(*files) as (port, process):
            check(not left[0].exists() and len(list((folder / "kv").iterdir())) == 2, "the file of the server that was killed is there")
            check(answers(port) == wanted, "another answer after the other server's end")
        check([path.name for path in (folder / "kv").iterdir()] == ["notes.txt"], "a file of somebody else was removed")
        out, errors = prl("inference", "--model.name", harness.warm_model(), "--kv-cache-offload.type", "native", "--kv-cache-offload.disk.num-bytes", 1000000,
                          cwd=folder, expect=None, timeout=60)
        check("kv_cache_offload.disk.path" in out + errors, f"{out[-500:]} {errors[-500:]}")


if __name__ == "__main__":
    harness.main(test_bad_requests_are_refused_by_name, test_keys_guard_their_routes, test_a_full_queue_answers_429,
                 test_requests_are_held_during_a_pause_and_an_update, test_a_client_that_leaves_cancels_its_request,
                 test_an_override_of_the_rotary_scaling_serves_longer_texts_and_takes_no_trainers_weights, test_a_taken_port_is_named, test_its_lines_are_kept_in_a_file, test_a_thousand_connections_with_32_running,
                 test_blocks_without_room_in_the_cache_come_back_from_host_memory,
                 test_blocks_without_room_in_host_memory_come_back_from_files_and_no_file_is_left)
