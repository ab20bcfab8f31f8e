"""What the integration tests share: running prl, tiny models, HTTP calls, and waiting with deadlines. Standard library only."""
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRL = os.environ.get("PRL_BINARY", str(ROOT / "build/release/bin/prl"))


class Failure(Exception):
    pass


def check(condition, message):
    if not condition:
        raise Failure(message)


def prl(*arguments, cwd=None, expect=0, timeout=300, env=None):
    """Runs prl to its end and returns (stdout, stderr); fails when the exit status is not `expect` (None: any but 0)."""
    done = subprocess.run([PRL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})
    good = done.returncode != 0 if expect is None else done.returncode == expect
    check(good, f"prl {' '.join(map(str, arguments))} exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, done.stderr


@contextlib.contextmanager
def running(*arguments, cwd=None, env=None, log=None):
    """prl in the background; killed at the end of the block if it still runs."""
    stream = open(log, "wb") if log else subprocess.DEVNULL
    process = subprocess.Popen([PRL, *map(str, arguments)], cwd=cwd, stdout=stream, stderr=subprocess.STDOUT,
                               env={**os.environ, **(env or {})})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        if log:
            stream.close()


@contextlib.contextmanager
def workspace(name):
    """A scratch folder, kept when the block fails so that its logs can be read."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"prl-{name}-"))
    try:
        yield folder
    except BaseException:
        print(f"kept for inspection: {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until(condition, seconds, what, step=0.05):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(step)
    raise Failure(f"waited {seconds} s for {what}")


def request(port, method, path, body=None, headers=None, timeout=60):
    """(status, parsed JSON or text) of one HTTP call."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = None if body is None else body if isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        text = reply.read().decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            return reply.status, json.loads(text)
        return reply.status, text
    finally:
        connection.close()


def is_healthy(port):
    try:
        return request(port, "GET", "/health", timeout=5)[0] == 200
    except OSError:
        return False


def tiny_model(folder, *extra):
    prl("init-model", folder, "--family", "qwen3", "--vocab-size", 320, "--hidden-size", 64, "--intermediate-size", 128,
        "--num-layers", 2, "--num-heads", 4, "--num-kv-heads", 2, "--initializer-range", "0.06", "--seed", 7, *extra)
    return folder


def metrics(output_dir):
    """All rows of metrics.jsonl below a run's folder, merged by step."""
    rows = {}
    for path in pathlib.Path(output_dir).rglob("metrics.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows.setdefault(row["step"], {}).update(row)
    return rows


def main(*tests):
    """Runs test functions; the exit status counts the failures."""
    wanted = sys.argv[1:]
    failures = 0
    for test in tests:
        if wanted and test.__name__ not in wanted:
            continue
        started = time.monotonic()
        try:
            test()
            print(f"ok    {test.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except (Failure, subprocess.TimeoutExpired, OSError, AssertionError, KeyError, ValueError) as error:
            failures += 1
            print(f"FAIL  {test.__name__}: {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failures else 0)
