"""What the integration tests share: running prl, tiny models, HTTP calls, and waiting with deadlines. Standard library only."""
import contextlib
import fcntl
import hashlib
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRL = os.path.abspath(os.environ.get("PRL_BINARY", str(ROOT / "build/release/bin/prl")))


# The task of every test: words of a few letters, so that a model of 90,000 parameters gets some of it right and rewards differ.
ENV_ARGS = {"mode": "tiny", "min_chars": 4, "max_chars": 8, "alphabet": "abcd"}
SKIP = 77  # exit status of a script that could not run here; ctest calls it skipped


class Failure(Exception):
    pass


class Skip(Exception):
    """Raised by a test that this machine cannot run."""


def check(condition, message):
    if not condition:
        raise Failure(message)


def prl(*arguments, cwd=None, expect=0, timeout=900, env=None):
    """Runs prl to its end and returns (stdout, stderr); fails when the exit status is not `expect` (None: any but 0)."""
    done = subprocess.run([PRL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})
    good = done.returncode != 0 if expect is None else done.returncode == expect
    check(good, f"prl {' '.join(map(str, arguments))} exited with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, done.stderr


@contextlib.contextmanager
def running(*arguments, cwd=None, env=None, log=None):
    """prl in the background; killed at the end of the block if it still runs. It runs in the folder of `log` if no other is given."""
    cwd = cwd or (log and pathlib.Path(log).parent)
    stream = open(log, "wb") if log else subprocess.DEVNULL
    process = subprocess.Popen([PRL, *map(str, arguments)], cwd=cwd, stdout=stream, stderr=subprocess.STDOUT,
                               env={**os.environ, **(env or {})})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        if log:
            stream.close()


@contextlib.contextmanager
def hangups(action):
    """What SIGHUP does to processes that are started in the block, whatever it does to this one: under `nohup make test` it is ignored, and
    they would inherit that. Main thread only."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def heartbeats(first_status=200):
    """(URL, paths that were asked for so far) of a server that takes heartbeats; it answers the first one with `first_status`."""
    beats = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            beats.append(self.path)
            self.send_response(200 if len(beats) > 1 else first_status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/beat", beats
    finally:
        server.shutdown()


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
    """A port that is free just now, and so is the next one (ZeroMQ transports use two)."""
    for _ in range(1000):
        with socket.socket() as s, socket.socket() as t:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                t.bind(("127.0.0.1", port + 1))
                return port
    raise Failure("no two free ports beside each other in 1000 tries")


def free_ports(count):
    """As many of them, which do not take each other's next one."""
    ports = []
    while len(ports) < count:
        port = free_port()
        if all(abs(port - other) > 2 for other in ports):
            ports.append(port)
    return ports


def wait_until(condition, seconds, what, step=0.05):
    """`seconds` is generous on a machine that does nothing else; under load it may take several times as long."""
    seconds *= 3
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


def warm_model():
    """A tiny model after a short SFT warm-up, made once per build of prl and shared by all scripts. Read only."""
    cache = pathlib.Path(PRL).resolve().parent.parent / "integration"
    cache.mkdir(parents=True, exist_ok=True)
    binary = os.stat(PRL)
    stamp = f"{binary.st_size}-{binary.st_mtime_ns}"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = cache / stamp
        if not ready.exists():
            for old in cache.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            making = cache / "making"
            making.mkdir()
            tiny_model(making / "base")
            sft_data(making / "sft.jsonl", 512)
            prl("sft", "--model.name", making / "base", "--data.name", making / "sft.jsonl", "--data.seq-len", 256,
                "--data.batch-size", 8, "--max-steps", 60, "--optim.lr", "5e-3", "--ckpt", "--output-dir", making / "sft")
            making.rename(ready)
    return ready / "sft/weights/step_60"


def sft_data(path, num_examples):
    prl("make-data", "--output", path, "--num-examples", num_examples, "--env.id", "reverse-text",
        "--env.args", json.dumps(ENV_ARGS))
    return path


# Published data sets as their repositories are laid out, with rows of the tests' own.
DATA_SETS = {
    "openai/gsm8k": {"main/train-00000-of-00001.jsonl": [{"question": f"What is {n} + {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"} for n in range(1, 20)],
                     "main/test-00000-of-00001.jsonl": [{"question": f"What is {n} + 1?", "answer": f"One more: {n + 1}.\n#### {n + 1}"} for n in range(1, 20)]},
    "HuggingFaceH4/MATH-500": {"test.jsonl": [{"problem": f"What is half of {n}?", "answer": f"\\frac{{{n}}}{{2}}", "level": 1} for n in range(1, 20, 2)]},
    "opencompass/AIME2025": {"README.md": "---\nconfigs:\n" + "".join(
        f"- config_name: AIME2025-{part}\n  data_files:\n  - split: test\n    path: aime2025-{part}.jsonl\n" for part in ("I", "II")) + "---\n",
        "aime2025-I.jsonl": [{"question": "What is 7 times 10?", "answer": "70"}], "aime2025-II.jsonl": [{"question": "What is an angle?", "answer": "336^\\circ"}]},
    "willcb/rare-wiki-pages": {"data/train-00000-of-00001.jsonl": [{"id": f"p{n}", "title": f"Town {n}", "content": f"# Town {n}\n\nIt lies at river {n}."} for n in range(8)]},
    "willcb/wiki-trivia-questions-v4": {"data/train-00000-of-00001.jsonl": [{"question": f"At which river lies Town {n}?", "answer": f"river {n}"} for n in range(8)]},
}


def hub_data_sets(cache):
    """Fills a cache of Hugging Face's clients with DATA_SETS; the variables that name it, for programs that must not ask a network."""
    commit = "a" * 40
    for repo, files in DATA_SETS.items():
        at = pathlib.Path(cache) / ("datasets--" + repo.replace("/", "--"))
        (at / "refs").mkdir(parents=True)
        (at / "refs/main").write_text(commit)
        for name, rows in files.items():
            path = at / "snapshots" / commit / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def rl_config(path, model, **top):
    """Writes a small RL run on reverse-text as TOML; `top` are top-level keys of simple types."""
    keys = {"max_steps": 10, "seq_len": 256, **top}
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in ENV_ARGS.items())
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + f"""
[model]
name = {json.dumps(str(model))}
[trainer.optim]
lr = 3e-4
[orchestrator]
batch_size = 16
group_size = 4
[orchestrator.train.sampling]
max_completion_tokens = 48
[[orchestrator.train.env]]
id = "reverse-text"
args = {{ {args} }}
[inference]
max_num_seqs = 16
[inference.model]
max_model_len = 256
""")
    return path


def role_pids(log):
    """Process ids of the roles, from what `prl rl` says when it starts them."""
    return {role: int(pid) for role, pid in re.findall(r"started (\w+) \(pid (\d+)\)", pathlib.Path(log).read_text())}


@contextlib.contextmanager
def slowed(pid, running=0.05, stopped=0.25):
    """Stops and continues a process in turns, so that it gets a part of its time only."""
    done = threading.Event()

    def turns():
        with contextlib.suppress(ProcessLookupError):
            while not done.is_set():
                os.kill(pid, signal.SIGCONT)
                if done.wait(running):
                    return
                os.kill(pid, signal.SIGSTOP)
                done.wait(stopped)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def digest(folder, pattern="*"):
    """SHA-256 over the names and bytes of the files of a folder that match."""
    hasher = hashlib.sha256()
    files = sorted(path for path in pathlib.Path(folder).rglob(pattern) if path.is_file())
    check(files, f"{folder} holds no {pattern}")
    for path in files:
        hasher.update(str(path.relative_to(folder)).encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def without_checksum(data):
    """A safetensors file of ours that no longer says what its bytes were, so that what is damaged in it is met later."""
    return data.replace(b'"prl_xxh3_16m"', b'"anything_16m"', 1)


def tensor_digest(folder):
    """SHA-256 over the names, types, shapes and bytes of the tensors of a folder, in however many files they lie."""
    tensors = {}
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    check(files, f"{folder} holds no *.safetensors")
    for path in files:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = (entry["dtype"], entry["shape"], hashlib.sha256(data[start + begin:start + end]).hexdigest())
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def rows_of(path):
    """The rows of a .jsonl file that may still be written: a last line without its end is not there yet, nor is a missing file."""
    path = pathlib.Path(path)
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def metrics(output_dir):
    """All rows of metrics.jsonl below a run's folder, merged by step."""
    rows = {}
    for path in pathlib.Path(output_dir).rglob("metrics.jsonl"):
        for row in rows_of(path):
            rows.setdefault(row["step"], {}).update(row)
    return rows


def check_rows(output_dir):
    """Every row of metrics.jsonl is whole, has no key twice, and is the only one of its step and role, in the order of steps."""
    path = pathlib.Path(output_dir) / "metrics.jsonl"
    newest = {}

    def unique(pairs):
        keys = [key for key, _ in pairs]
        check(len(keys) == len(set(keys)), f"{path}: a row has a key twice: {sorted(key for key in keys if keys.count(key) > 1)}")
        return dict(pairs)

    text = path.read_text()
    check(text.endswith("\n"), f"{path}: the last row is cut off")
    for number, line in enumerate(text.splitlines(), 1):
        row = json.loads(line, object_pairs_hook=unique)
        check(row["step"] > newest.get(row["role"], -1), f"{path}:{number}: step {row['step']} of {row['role']} after {newest[row['role']] if row['role'] in newest else None}")
        newest[row["role"]] = row["step"]
    return newest


def main(*tests):
    """Runs test functions; the exit status counts the failures."""
    wanted = sys.argv[1:]
    names = {test.__name__ for test in tests}
    forgotten = sorted({name for name in vars(sys.modules["__main__"]) if name.startswith("test_")} - names)
    if forgotten or not names.issuperset(wanted):
        sys.exit(f"not given to harness.main: {', '.join(forgotten)}" if forgotten else f"no such test among {', '.join(sorted(names))}: {wanted}")
    failures = skips = 0
    for test in tests:
        if wanted and test.__name__ not in wanted:
            continue
        started = time.monotonic()
        try:
            test()
            print(f"ok    {test.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
        except Skip as reason:
            skips += 1
            print(f"skip  {test.__name__}: {reason}", flush=True)
        except (Failure, subprocess.TimeoutExpired, OSError, AssertionError, KeyError, ValueError) as error:
            failures += 1
            print(f"FAIL  {test.__name__}: {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failures else SKIP if skips == len(wanted or tests) else 0)
