#!/usr/bin/env python3
"""`prl inference` against requests that mean harm: other clients go on, memory stays bounded, weights stay good, and pages stay out."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import struct
import time

import harness
from harness import check, request
from server_test import complete, error_of, metric, server


def resident_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise harness.Failure(f"process {pid} has no memory")


def raw(port, data, seconds=20):
    """Sends bytes and returns what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                answer += piece
        return answer.decode("latin-1")


@contextlib.contextmanager
def beside(*hostile):
    """Runs the calls in threads; yields their futures, which are done at the end."""
    with concurrent.futures.ThreadPoolExecutor(len(hostile)) as pool:
        futures = [pool.submit(one) for one in hostile]
        yield futures
        for future in futures:
            future.result(120)


def check_others(port, futures, least=10, most=100):
    """One-token requests while the futures run; the machine may be busy, so the median has to be good and the worst bearable."""
    times = []
    while len(times) < least or (len(times) < most and not all(future.done() for future in futures)):
        began = time.monotonic()
        status, body = complete(port, max_tokens=1)
        check(status == 200, f"another client got {status}: {body}")
        times.append(time.monotonic() - began)
    check(statistics.median(times) < 1, f"other clients wait {statistics.median(times):.2f} s, the worst {max(times):.2f} s")
    check(max(times) < 3, f"another client waited {max(times):.2f} s")


def test_patterns_that_remember_much_hold_nobody():
    with server("--model.max-model-len", 2048) as (port, _):
        def hostile():
            with contextlib.suppress(TimeoutError):  # it may go on for long; then its client leaves
                return complete(port, prompt="ab", n=16, max_tokens=1500, guided_regex="(a|b)*a(a|b){1000}", timeout=15)
            return 200, None
        with beside(hostile) as futures:
            check_others(port, futures, most=100_000)
        status, body = futures[0].result()
        check(status == 200 or (status == 400 and "too much work" in json.dumps(body)), f"{status} {body}")


def test_large_schemas_hold_nobody():
    names = [f"property_{i}" for i in range(5000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    with server() as (port, _):
        with beside(lambda: complete(port, max_tokens=4, guided_json=schema)) as futures:
            check_others(port, futures)
        status, body = futures[0].result()
        check(status in (200, 400), f"{status} {body}")


def test_prompts_that_cannot_fit_are_refused_by_length():
    prompt = json.dumps({"prompt": "lorem ipsum dolor sit amet " * 1_500_000}).encode()  # 40 MB
    with server() as (port, process):
        before = resident_mib(process.pid)
        began = time.monotonic()
        with beside(*[lambda: request(port, "POST", "/v1/completions", prompt, timeout=100)] * 4) as futures:
            check_others(port, futures)
        for future in futures:
            status, body = future.result()
            check(status == 503 or error_of((status, body), 400, "This model's maximum context length is"), f"{status} {body}")
        took = time.monotonic() - began
        check(took < 60, f"four refusals took {took:.1f} s")
        ids = json.dumps({"prompt": [1] * 3_000_000}).encode()
        error_of(request(port, "POST", "/v1/completions", ids), 400, "This model's maximum context length is")
        error_of(request(port, "POST", "/detokenize", json.dumps({"tokens": [1] * 3_000_000}).encode()), 400, "tokens")
        harness.wait_until(lambda: resident_mib(process.pid) < before + 150, 20, "the memory of refused requests to be given back")


def test_nothing_is_read_before_the_key_is_checked():
    with server("--server.api-key", "k") as (port, process):
        before = resident_mib(process.pid)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"
        answer = raw(port, head)  # not one byte of the body
        check(answer.startswith("HTTP/1.1 401") and "AuthenticationError" in answer, answer[:200])
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            for answer in pool.map(lambda _: raw(port, head + b"x" * 10_000_000), range(20)):
                check(answer == "" or answer.startswith("HTTP/1.1 401"), answer[:200])
        check(resident_mib(process.pid) < before + 60, f"{resident_mib(process.pid) - before:.0f} MiB are held for requests without a key")
        check(complete(port, {"Authorization": "Bearer k"})[0] == 200, "the right key is refused")


def test_all_bodies_together_have_a_bound():
    with server("--server.max-body-bytes", 4_000_000, "--server.max-held-body-bytes", 8_000_000) as (port, _):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3500000\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(2):  # most of two bodies, and then silence
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(head + b"x" * 3_400_000)
            answer = harness.wait_until(lambda: (lambda text: text if " 503 " in text[:16] else "")(raw(port, head, 2)), 20, "a refusal")
            check("Retry-After:" in answer, answer[:300])
            check(complete(port)[0] == 200, "a small request does not fit any more")
        harness.wait_until(lambda: "context length" in raw(port, head + b'{"prompt": "' + b"a" * 3499986 + b'"}', 20), 20, "room again")


def write_tensor(path, name, index, value):
    """Overwrites one element of a stored tensor."""
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    entry = header[name]
    width = {"F32": 4, "BF16": 2}[entry["dtype"]]
    bits = struct.pack("<f", value)[-width:]  # bfloat16 is the upper half
    at = 8 + size + entry["data_offsets"][0] + index * width
    data[at:at + width] = bits
    # As a program of another project would write it: without our checksum of the bytes.
    path.write_bytes(harness.without_checksum(bytes(data)))


def test_bad_weights_are_refused_and_the_old_ones_stay():
    model = harness.warm_model()
    with server() as (port, process), harness.workspace("weights") as folder:
        update = lambda path, **more: request(port, "POST", "/update_weights", {"weight_dir": str(path), **more}, timeout=30)
        reply = complete(port, temperature=0)[1]["choices"][0]["text"]

        def unchanged(version):
            status, body = complete(port, temperature=0)
            check(status == 200 and body["choices"][0]["text"] == reply, f"other text after a refused update: {status} {body}")
            check(body["policy_version"]["end"] == version, f"{body['policy_version']}")
            check(request(port, "GET", "/health")[0] == 200, "the server is not healthy")

        for number, (name, value) in enumerate([("model.layers.1.mlp.down_proj.weight", float("nan")),
                                                ("model.norm.weight", float("inf")),
                                                ("model.embed_tokens.weight", float("-inf"))]):
            bad = folder / f"step_{number + 1}"
            shutil.copytree(model, bad)
            write_tensor(bad / "model.safetensors", name, 7, value)
            error_of(update(bad), 400, name, "element 7")
            unchanged(0)

        check(update(model, version=5)[0] == 200, "good weights are refused")
        error_of(update(model, version=4), 409, "older", "force")
        unchanged(5)
        check(update(model, version=5)[0] == 200, "the same version again is refused")
        check(update(model, version=4, force=True)[1]["policy_version"] == 4, "force does not go back")

        pipe = folder / "pipe"
        shutil.copytree(model, pipe)
        (pipe / "model.safetensors").unlink()
        os.mkfifo(pipe / "model.safetensors")
        error_of(update(pipe), 400, "regular file")
        config_pipe = folder / "config-pipe"
        shutil.copytree(model, config_pipe)
        (config_pipe / "config.json").unlink()
        os.mkfifo(config_pipe / "config.json")
        error_of(update(config_pipe), 400, "regular file")
        ring = folder / "ring"
        ring.mkdir()
        (ring / "model.safetensors").symlink_to("model.safetensors")
        error_of(update(ring), 404, "model.safetensors")
        (folder / "itself").symlink_to("itself")
        error_of(update(folder / "itself"), 404)
        error_of(update("/" + "x" * 5000), 404)
        error_of(update("a\0b"), 400, "weight_dir")

        other = folder / "other"
        shutil.copytree(model, other)
        config = json.loads((other / "config.json").read_text())
        config["rms_norm_eps"] = 0.01  # the same shapes, another function
        (other / "config.json").write_text(json.dumps(config))
        error_of(update(other, version=9), 400, "config.json", "rms_norm_eps")
        unchanged(4)


def test_http_as_rfc_9112_wants_it():
    with server() as (port, _):
        line, length = b"POST /v1/completions HTTP/1.1\r\n", b"Content-Length: 2\r\n"
        cases = [(b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
                 (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
                 (line + b"Host: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
                 (line + b"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
                 (line + b"Host: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
                 (line + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n" + length + b"\r\n0\r\n\r\n", 400),
                 (line + b"Host: localhost\r\n" + length + length + b"\r\n{}", 400),
                 (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
                 (b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: cake\r\nConnection: close\r\n\r\n", 417)]
        for data, status in cases:
            answer = raw(port, data)
            check(answer.startswith(f"HTTP/1.1 {status} "), f"{data!r}: wanted {status}, got {answer[:80]!r}")
        trailers = line + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"Field: value\r\n" * 50_000
        check(raw(port, trailers).startswith("HTTP/1.1 431 "), "endless trailers are read")
        check(complete(port)[0] == 200, "the server does not go on")


def test_pages_of_other_origins_stay_out():
    with server("--server.cors-origins", '["https://ui.example"]') as (port, _):
        evil, friend = {"Origin": "https://evil.example"}, {"Origin": "https://ui.example"}
        error_of(request(port, "POST", "/pause", None, evil), 403, "cors_origins")
        error_of(request(port, "POST", "/pause", None, {"Host": f"evil.example:{port}"}), 403, "allowed_hosts")
        error_of(complete(port, evil), 403)
        error_of(request(port, "POST", "/v1/completions", b'{"prompt": "a"}', {"Content-Type": "text/plain"}), 415, "application/json")
        check(complete(port)[0] == 200 and complete(port, friend)[0] == 200, "a program or a listed page is refused")
        answer = raw(port, b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://ui.example\r\n"
                     b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\nConnection: close\r\n\r\n")
        check(answer.startswith("HTTP/1.1 204 ") and "Access-Control-Allow-Origin: https://ui.example\r\n" in answer, answer)
        check("content-type" in answer and "Content-Length" not in answer, answer)


def test_what_each_choice_copies_is_bounded():
    with server() as (port, process):
        before = resident_mib(process.pid)
        error_of(complete(port, n=128, stop=["x" * 500_000] * 40), 400, "stop")
        error_of(complete(port, n=128, stop="x" * 16_385), 400, "stop")
        error_of(complete(port, n=128, logit_bias={str(i): 1 for i in range(5000)}), 400, "logit_bias")
        check(complete(port, n=8, stop=["x" * 1000] * 16, logit_bias={str(i): 0 for i in range(300)})[0] == 200, "what is allowed is refused")
        harness.wait_until(lambda: resident_mib(process.pid) < before + 100, 20, "the memory of refused requests to be given back")


def test_more_choices_than_ever_fit_are_400():
    with server("--server.max-queued-requests", 4, "--max-num-seqs", 4) as (port, _):
        error_of(complete(port, n=9), 400, "n")
        error_of(complete(port, prompt=["a"] * 3, n=3), 400, "9 requests")
        check(complete(port, n=8)[0] == 200, "what fits is refused")


def test_streams_say_their_version():
    with server() as (port, _):
        body = json.dumps({"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}).encode()
        text = request(port, "POST", "/v1/completions", body)[1]
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        check(events[-1]["policy_version"] == {"start": 0, "end": 0} and "usage" in events[-1], f"{events[-1]}")
        check(events[-2]["policy_version"] == {"start": 0, "end": 0}, f"{events[-2]}")


def test_a_server_that_stops_says_so():
    port = harness.free_port()
    with harness.workspace("stop") as folder, harness.running(
            "inference", "--model.name", harness.warm_model(), "--server.port", port, log=folder / "log") as process:
        harness.wait_until(lambda: harness.is_healthy(port), 30, "the server")
        check(request(port, "POST", "/pause")[0] == 200, "no pause")  # so that no request can end by itself
        fields = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            stream = pool.submit(request, port, "POST", "/v1/completions", {**fields, "stream": True})
            whole = pool.submit(request, port, "POST", "/v1/completions", fields)
            harness.wait_until(lambda: metric(port, "vllm:num_requests_waiting") >= 2, 20, "two requests that wait")
            process.send_signal(signal.SIGTERM)
            text = stream.result(40)[1]
            check("stopping" in text and text.rstrip().endswith("data: [DONE]"), f"the stream ends in {text[-300:]!r}")
            error_of(whole.result(40), 503, "stopping")
        check(process.wait(90) == 0, f"exit status {process.returncode}")


if __name__ == "__main__":
    harness.main(test_patterns_that_remember_much_hold_nobody, test_large_schemas_hold_nobody,
                 test_prompts_that_cannot_fit_are_refused_by_length, test_nothing_is_read_before_the_key_is_checked,
                 test_all_bodies_together_have_a_bound, test_bad_weights_are_refused_and_the_old_ones_stay, test_http_as_rfc_9112_wants_it,
                 test_pages_of_other_origins_stay_out, test_what_each_choice_copies_is_bounded, test_more_choices_than_ever_fit_are_400,
                 test_streams_say_their_version, test_a_server_that_stops_says_so)
