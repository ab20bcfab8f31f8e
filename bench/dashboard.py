#!/usr/bin/env python3
"""What the page of a run costs the run, and how soon it shows something: `prl rl` on random weights, in turns with pages open and without.

usage: dashboard.py PRL MODEL_FOLDER SHAPE [--pages N] [--turns N] [--seconds S] [--json FILE]; the folder is made when it is missing, of a
SHAPE of models.py. A page is a connection that follows the events and fetches, at most every 0.3 s as the real one does, what its view
shows. Pages are in a process of their own, on the same machine: what they cost besides the server counts too. Prints one JSON object:
slower_percent is the median over neighbouring turns of what a step takes longer with pages, cpu_percent the same of the processor time
that the run takes per step, which other work on the machine changes less.
"""
import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from models import ensure_model

ENV_ARGS = '{"mode": "tiny", "min_chars": 4, "max_chars": 8, "alphabet": "abcd"}'
OPTIONS = ["--seq-len", "512", "--inference.max-num-seqs", "16", "--orchestrator.batch-size", "16", "--orchestrator.group-size", "4", "--orchestrator.train.sampling.max-completion-tokens", "64",
           "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", ENV_ARGS]
VIEWS = [["/api/series?run=0", "/api/metrics?run=0&s=trainer:loss/mean&s=orchestrator:reward/all/mean&s=trainer:entropy/all/mean&s=trainer:mismatch_kl/all/mean"],
         ["/api/timeline?run=0"], ["/api/rollouts?run=0"], ["/api/logs?run=0"]]
PAUSE_S = 0.3
PATIENCE_S = 300

PAGE = """
import http.client, sys, threading, time
host, port, pause, views = "127.0.0.1", int(sys.argv[1]), float(sys.argv[2]), [v.split(" ") for v in sys.argv[3:]]
def follow(paths):
    last = 0
    events = http.client.HTTPConnection(host, port, timeout=120)
    events.request("GET", "/api/events")
    stream = events.getresponse()
    others = http.client.HTTPConnection(host, port, timeout=120)
    while stream.readline():
        if time.monotonic() - last < pause:
            continue
        last = time.monotonic()
        for path in paths:
            others.request("GET", path)
            others.getresponse().read()
for number in range(1, len(views)):
    threading.Thread(target=follow, args=(views[number],), daemon=True).start()
print("ready", flush=True)
follow(views[0])
"""


def warm_up(prl, model, folder):
    """The model after 100 steps of fine-tuning on the task: of random weights all rewards are equal, and nothing is trained."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    data = os.path.join(folder, "data.jsonl")
    subprocess.run([prl, "make-data", "--output", data, "--num-examples", "512", "--env.id", "reverse-text", "--env.args", ENV_ARGS], **quiet)
    subprocess.run([prl, "sft", "--model.name", model, "--data.name", data, "--data.seq-len", "256", "--data.batch-size", "8", "--max-steps", "100", "--optim.lr", "1e-3", "--ckpt", "--no-dashboard",
                    "--output-dir", os.path.join(folder, "sft")], **quiet)
    return os.path.join(folder, "sft/weights/step_100")


def wait(ask, what):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = ask()
        if value:
            return value
        time.sleep(0.05)
    sys.exit(f"waited {PATIENCE_S} s for {what}")


def num_steps(out):
    """Steps that were trained so far."""
    try:
        with open(os.path.join(out, "metrics.jsonl")) as rows:
            return sum('"role":"trainer"' in line.replace(" ", "") for line in rows if line.endswith("\n"))
    except OSError:
        return 0


def cpu_seconds(pid):
    """Processor time that a process has taken."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_view(port):
    """Seconds until a page that is opened has its scripts and what it shows first."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def get(path):
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    text = get("/")
    for path in set(re.findall(r'(?:src|href)="(/[a-z]+\.(?:js|css))"', text)):
        for other in re.findall(r'from "\./([a-z]+\.js)"', get(path)):
            get(f"/{other}")
    for path in ("/api/runs", *VIEWS[0]):
        get(path)
    connection.close()
    return time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prl")
    parser.add_argument("model")
    parser.add_argument("shape")
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    ensure_model(options.prl, os.path.abspath(options.model), options.shape)
    with tempfile.TemporaryDirectory(prefix="prl-bench-page-") as out:
        log = open(os.path.join(out, "console"), "w+b")
        run = subprocess.Popen([options.prl, "rl", "--model.name", warm_up(options.prl, os.path.abspath(options.model), out), "--output-dir", os.path.join(out, "run"), "--max-steps", "1000000", "--dashboard.port", "0",
                                *OPTIONS], stdout=log, stderr=subprocess.STDOUT)
        try:
            def page():
                if run.poll() is not None:
                    sys.exit(f"the run ended:\n{open(log.name, errors='replace').read()[-2000:]}")
                return re.search(r"page: http://127\.0\.0\.1:(\d+)/", open(log.name, errors="replace").read())
            port = int(wait(page, "the page").group(1))
            wait(lambda: page() and num_steps(f"{out}/run") >= 3, "three steps")
            wall, cpu = {0: [], options.pages: []}, {0: [], options.pages: []}
            views = [" ".join(VIEWS[number % len(VIEWS)]) for number in range(options.pages)]
            for turn in range(2 * options.turns):
                pages = options.pages if turn % 2 == 1 else 0
                viewers = None
                if pages:
                    viewers = subprocess.Popen([sys.executable, "-c", PAGE, str(port), str(PAUSE_S), *views], stdout=subprocess.PIPE)
                    viewers.stdout.readline()
                # From the end of a step to the end of a step.
                before = num_steps(f"{out}/run")
                wait(lambda: num_steps(f"{out}/run") > before, "a step")
                first, begin, used = num_steps(f"{out}/run"), time.monotonic(), cpu_seconds(run.pid)
                wait(lambda: page() and time.monotonic() - begin > options.seconds, "the time of a turn")
                before = num_steps(f"{out}/run")
                wait(lambda: num_steps(f"{out}/run") > before, "a step")
                count = num_steps(f"{out}/run") - first
                wall[pages].append((time.monotonic() - begin) / count)
                cpu[pages].append((cpu_seconds(run.pid) - used) / count)
                if viewers:
                    viewers.kill()
                    viewers.wait()
            views_s = sorted(first_view(port) for _ in range(5))
        finally:
            run.terminate()
            run.wait(60)
    def more(kind):
        """By how many percent each turn with pages is above the turn without before it."""
        return [round(100 * (opened / closed - 1), 2) for closed, opened in zip(kind[0], kind[options.pages])]
    result = {"pages": options.pages, "turns": options.turns, "seconds": options.seconds, "step_s_without": [round(one, 4) for one in wall[0]], "step_s_with": [round(one, 4) for one in wall[options.pages]],
              "slower_percent": statistics.median(more(wall)), "slower_percent_of_turns": more(wall), "cpu_percent": statistics.median(more(cpu)), "cpu_percent_of_turns": more(cpu),
              "cpu_s_per_step": round(statistics.median(cpu[0]), 4), "first_view_s": [round(one, 3) for one in views_s]}
    print(json.dumps(result))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
