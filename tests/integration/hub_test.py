#!/usr/bin/env python3
"""Models and data sets by hub id, from a server that speaks the hub's routes; GGUF files converted; models talked to."""
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import threading

import harness
from harness import check, prl

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 20_000  # bytes from which on a file counts as large and lies on the CDN


class Hub:
    """Repositories from folders on disk: {"models/org/name": folder}. Large files lie behind a redirect to another port."""

    def __init__(self, repos, token=None):
        self.repos, self.token, self.log, self.breaks = repos, token, [], 0
        self.is_open = threading.Event()  # until it is set nothing is answered
        self.is_open.set()
        self.hub, self.cdn = self.serve(self.answer_hub), self.serve(self.answer_cdn)
        self.url = f"http://127.0.0.1:{self.hub.server_port}"

    @staticmethod
    def serve(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asked was killed
                    answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for server in (self.hub, self.cdn):
            server.shutdown()
            server.server_close()

    def send(self, handler, status, body=b"", **headers):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def answer_hub(self, handler):
        self.log.append((handler.command, handler.path, handler.headers.get("Authorization")))
        self.is_open.wait(300)
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(handler, 401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        listing = re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/revision/main", handler.path)
        if listing and listing[1] in self.repos:
            folder = self.repos[listing[1]]
            files = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
            return self.send(handler, 200, json.dumps({"sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}).encode())
        file = re.fullmatch(rf"/(datasets/)?([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", handler.path)
        folder = self.repos.get(f"{'datasets' if file and file[1] else 'models'}/{file[2]}") if file else None
        if folder is None or not (folder / file[3]).is_file():
            return self.send(handler, 404, b"{}", X_Error_Code="EntryNotFound" if folder else "RepoNotFound")
        data = (folder / file[3]).read_bytes()
        if len(data) < LARGE:
            etag = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
            return self.send(handler, 200, data, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
        etag = hashlib.sha256(data).hexdigest()
        location = f"http://127.0.0.1:{self.cdn.server_port}{folder}/{file[3]}"
        return self.send(handler, 302, b"", ETag='"other"', X_Repo_Commit=COMMIT, X_Linked_Etag=f'"{etag}"', X_Linked_Size=str(len(data)),
                         Location=location)

    def answer_cdn(self, handler):
        self.log.append((handler.command, handler.path, handler.headers.get("Authorization")))
        data = pathlib.Path(handler.path).read_bytes()
        begin = int(re.match(r"bytes=(\d+)-", handler.headers.get("Range") or "bytes=0-")[1])
        extra = {"Content_Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        if self.breaks > 0:
            self.breaks -= 1
            handler.send_response(206 if begin else 200)
            handler.send_header("Content-Length", str(len(data) - begin))
            for name, value in extra.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(data[begin:begin + (len(data) - begin) // 2])
            handler.close_connection = True
            return
        self.send(handler, 206 if begin else 200, data[begin:], **extra)


def data_set(folder):
    """Two subsets of two formats, told apart by a card."""
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\nconfigs:\n- config_name: lines\n  data_files:\n  - split: train\n    path: lines/*.jsonl\n"
                                      "  - split: test\n    path: held_out.jsonl\n- config_name: table\n  data_files: table.csv\n---\n# Text\n")
    (folder / "lines").mkdir()
    for shard in range(2):
        rows = [{"messages": [{"role": "user", "content": f"say {shard}{i}"}, {"role": "assistant", "content": f"{shard}{i}"}]} for i in range(20)]
        (folder / f"lines/part-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text('{"prompt": "say 9", "completion": "9"}\n')
    (folder / "table.csv").write_text("prompt,completion\n" + "".join(f"spell {i},\"letters, {i}\"\n" for i in range(30)))
    return folder


def environment(folder, hub, **extra):
    return {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HUB_CACHE": "", **extra}


SFT = ("sft", "--model.name", "org/tiny", "--data.name", "org/set", "--data.subsets", "lines,table", "--data.probabilities", "0.7,0.3",
       "--data.seq-len", 128, "--data.batch-size", 4, "--max-steps", 2, "--optim.lr", "1e-3")


def test_fine_tuning_by_hub_ids_then_without_the_hub():
    with harness.workspace("hub") as folder:
        repos = {"models/org/tiny": harness.tiny_model(folder / "tiny"), "datasets/org/set": data_set(folder / "set")}
        with Hub(repos, token="hf_secret") as hub:
            _, error = prl(*SFT, "--output-dir", folder / "none", env=environment(folder, hub), expect=None)
            check("there is no model org/tiny" in error and "HF_TOKEN" in error, f"a private repository is not explained:\n{error}")
            hub.breaks = 2
            prl(*SFT, "--output-dir", folder / "first", "--val.data.name", "org/set", "--val.data.subsets", "lines", "--val.data.splits", "test",
                "--val.interval", 1, env=environment(folder, hub, HF_TOKEN="hf_secret"))
            check(hub.breaks == 0 and any("/tiny/" in path and token is None for _, path, token in hub.log), "the CDN was not used as planned")
            check(all(token is None for _, path, token in hub.log if str(folder) in path), "the token left the hub's host")
            asked = len(hub.log)
        rows = harness.metrics(folder / "first")
        check({"progress/lines/ratio_samples", "progress/table/ratio_tokens", "val/loss"} <= set(rows[2]), f"metrics {sorted(rows[2])}")
        check(abs(rows[2]["progress/lines/ratio_samples"] + rows[2]["progress/table/ratio_samples"] - 1) < 1e-9, "shares do not sum to 1")
        cache = folder / "hf/hub"
        snapshot = cache / f"models--org--tiny/snapshots/{COMMIT}"
        check((cache / "models--org--tiny/refs/main").read_text() == COMMIT, "refs/main")
        check(os.readlink(snapshot / "model.safetensors").startswith("../../blobs/"), "snapshots link to blobs")
        check(not list(cache.rglob("*.incomplete")), "an unfinished download was left behind")

        # Offline, and with a hub that is gone: the same run from the cache.
        class Gone:
            url = "http://127.0.0.1:1"
        prl(*SFT, "--output-dir", folder / "offline", env=environment(folder, Gone, HF_HUB_OFFLINE="1"))
        _, log = prl(*SFT, "--output-dir", folder / "unplugged", env=environment(folder, Gone))
        check("in the cache is used" in log, f"the hub's absence is not mentioned:\n{log}")
        for name in ("offline", "unplugged"):
            check(harness.metrics(folder / name)[2]["loss/mean"] == rows[2]["loss/mean"], f"{name}: another loss than online")
        _, error = prl("sft", *SFT[1:2], "org/other", *SFT[3:], env=environment(folder, Gone, HF_HUB_OFFLINE="1"), expect=None)
        check("org/other" in error and "HF_HUB_OFFLINE" in error, f"a model that is not cached is not explained:\n{error}")
        check(asked < 40, f"{asked} requests for a dozen files")


def test_ranks_that_are_killed_before_all_have_met_are_started_again():
    """While rank 0 waits for the hub nobody has met: there is no group that a rank could join again."""
    with harness.workspace("unmet") as folder:
        repos = {"models/org/tiny": harness.tiny_model(folder / "tiny"), "datasets/org/set": data_set(folder / "set")}
        log, steps = folder / "run.log", f"{folder}/out/metrics.jsonl"
        with Hub(repos) as hub:
            hub.is_open.clear()
            with harness.running("launch", "--nproc-per-node", 2, *SFT, "--healing.max-restarts", 3, "--healing.backoff-seconds", 0.1,
                                 "--output-dir", folder / "out", log=log, env=environment(folder, hub)) as run:
                harness.wait_until(lambda: hub.log or run.poll() is not None, 60, "rank 0 to ask the hub")
                for number, rank in enumerate(("sft_rank_1", "sft"), 1):
                    os.kill(harness.role_pids(log)[rank], signal.SIGKILL)
                    harness.wait_until(lambda: log.read_text().count(f"started {rank} (pid") == 2 or run.poll() is not None, 60, "the restart")
                    check(log.read_text().count("the ranks had not met yet") == number, log.read_text()[-3000:])
                hub.is_open.set()
                check(run.wait(180) == 0, log.read_text()[-3000:])
        check("(2 of 3 losses), it is started again in 0.2 s" in log.read_text(), log.read_text()[-3000:])
        check(len(harness.rows_of(steps)) >= 2, "steps are missing")


def test_a_gguf_file_is_converted_served_and_talked_to():
    with harness.workspace("gguf") as folder:
        gguf = harness.ROOT / "tests/fixtures/gguf/tiny_llama.gguf"
        prl("convert", gguf, folder / "model", "--dtype", "float32")
        _, error = prl("convert", gguf, folder / "model", expect=1)
        check("--overwrite" in error, error)
        config = json.loads((folder / "model/config.json").read_text())
        check(config["model_type"] == "llama" and config["tie_word_embeddings"], f"{config}")
        chat = ("chat", "--sampling.temperature", 0, "--sampling.max-tokens", 12, "--prompt", "the in a")
        local, _ = prl(*chat, "--model.name", folder / "model")
        check(local.endswith("\n"), f"no reply: {local!r}")
        port = harness.free_port()
        with harness.running("inference", "--model.name", folder / "model", "--server.port", port, log=folder / "server.log"):
            harness.wait_until(lambda: harness.is_healthy(port), 60, "the server")
            served, _ = prl(*chat, "--model.name", folder / "model", "--client.base-url", f"http://127.0.0.1:{port}/v1")
        check(served == local, f"the server says {served!r}, the process itself {local!r}")


def test_a_conversation_from_a_pipe():
    with harness.workspace("chat") as folder:
        model = harness.warm_model()
        script = "say ab\n/reset\nsay ab\n/system Be kind.\nsay ab\n/nonsense\n/exit\nnever\n"
        done = subprocess.run([harness.PRL, "chat", "--model.name", str(model), "--sampling.temperature", "0", "--sampling.max-tokens", "8"],
                              input=script, capture_output=True, text=True, timeout=120, cwd=folder)
        check(done.returncode == 0, f"{done.returncode}: {done.stderr}")
        first, _, second = done.stdout.partition("[forgotten]\n")
        check(second.startswith(first), f"after /reset the same question has another answer:\n{done.stdout}")
        check("/nonsense is no command" in done.stdout and "a new conversation" in done.stdout, done.stdout)


harness.main(test_fine_tuning_by_hub_ids_then_without_the_hub,
                 test_ranks_that_are_killed_before_all_have_met_are_started_again, test_a_gguf_file_is_converted_served_and_talked_to,
             test_a_conversation_from_a_pipe)
