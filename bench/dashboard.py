#!/usr/bin/env python3
"""What the page of a run costs the run, and how soon it shows something: `prl rl` with pages open and without, in many short turns.

usage: dashboard.py PRL MODEL_FOLDER SHAPE [--pages N] [--turns N] [--seconds S] [--nice N] [--json FILE]; the folder is made when it is missing, of a
SHAPE of models.py. A page is a connection that follows the events and asks what the real one asks (src/dashboard/page): what its view shows when it
is opened, the same again at the pace of that view when there is news (curves take their points from the news), and the list of runs every 3 s. Pages are
in a process of their own on the same machine, of the lowest priority unless --nice says otherwise: they stand for browsers, which
are elsewhere as a rule; viewers_cpu_percent is what they take of one processor.

Turns go without, with, with, without, and again: four turns give one ratio of the lengths of a step, in which a drift of the machine or of the run
cancels. Counted are the steps that lie within a turn, by the times of metrics.jsonl, after a moment for the change. The learning rate is 1e-12, so that
replies stay as long as they are. Prints one JSON object: slower_percent is the median over those ratios, slower_interval its 95% interval (bootstrap),
cpu_percent the same of the processor time that the run takes per step, which other work on the machine changes less. page_cpu_percent is the processor time
of the page's own threads per step with pages, in percent of what the run takes per step without: it counts what the page does and nothing else, so it
hardly depends on what else the machine does; page_cpu_ms and page_cpu_ms_without are the milliseconds.
"""
import argparse
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

from models import ensure_model

ENV_ARGS = '{"mode": "tiny", "min_chars": 4, "max_chars": 8, "alphabet": "abcd"}'
OPTIONS = ["--seq-len", "512", "--inference.max-num-seqs", "16", "--orchestrator.batch-size", "16", "--orchestrator.group-size", "4", "--orchestrator.train.sampling.max-completion-tokens", "64", "--orchestrator.train.sampling.min-tokens", "64",
           "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", ENV_ARGS]
CURVES = ["/api/series?run=0", "/api/metrics?run=0&points=800&s=trainer:loss/mean&s=orchestrator:reward/all/mean&s=trainer:entropy/all/mean&s=trainer:mismatch_kl/all/mean"]
# What a page asks when it is opened, and whether it asks again at news: seconds between, or none.
VIEWS = [(CURVES, None), (["/api/timeline?run=0&steps=20"], 1.5), (["/api/rollouts?run=0&order=newest&offset=0&limit=50"], 2), (["/api/logs?run=0&level=debug"], 1.5)]
RUNS_S = 3
SETTLE_S = 0.5
PATIENCE_S = 300

# Opens and closes its pages by the lines "open" and "close"; says how much processor time it has taken when it has closed them.
PAGES = """
import http.client, json, os, sys, threading, time
port, runs_s, nice, views = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
os.nice(nice)
is_open = False
def follow(paths, pause, ready):
    events = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    events.request("GET", "/api/events")
    stream = events.getresponse()
    ready.release()
    others = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    def ask(paths):
        for path in paths:
            others.request("GET", path)
            others.getresponse().read()
        return time.monotonic()
    last = last_runs = ask(["/api/runs", *paths])
    while is_open and stream.readline():
        if pause and time.monotonic() - last >= pause:
            last = ask(paths)
        if time.monotonic() - last_runs >= runs_s:
            last_runs = ask(["/api/runs"])
    events.sock and events.sock.close()
    stream.close(), events.close(), others.close()
pages = []
for line in sys.stdin:
    is_open = line == "open\\n"
    if is_open:
        ready = threading.Semaphore(0)
        pages = [threading.Thread(target=follow, args=(paths, pause, ready), daemon=True) for paths, pause in views]
        for page in pages:
            page.start()
        for page in pages:
            ready.acquire()
    else:
        for page in pages:
            page.join()
    print(time.process_time(), flush=True)
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


def step_times(out):
    """When each trained step ended, Unix time."""
    try:
        with open(os.path.join(out, "metrics.jsonl")) as lines:
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
    except OSError:
        return []
    return [row["time"] for row in rows if row["role"] == "trainer"]


def steps_within(times, begin, end):
    """(count, seconds) of the steps that began and ended between two moments."""
    within = [time for time in times if begin <= time <= end]
    return max(0, len(within) - 1), within[-1] - within[0] if within else 0.0


def median_and_interval(values):
    """The median, and its 95% interval by the bootstrap."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(10_000))
    return round(statistics.median(values), 2), [round(medians[250], 2), round(medians[-251], 2)]


def cpu_seconds(pid):
    """Processor time that a process has taken."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_seconds(pid):
    """Processor time of the threads that serve the page, by the scheduler's own count in nanoseconds."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text() == "page\n":
                total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # a thread that has ended meanwhile
    return total / 1e9


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
    for path in ("/api/runs", *CURVES):
        get(path)
    connection.close()
    return time.monotonic() - begin


def summary(options, turns, times, viewers_s, views_s):
    slower, cpu, of_page, step_s, cpu_s, page_s = [], [], [], {True: [], False: []}, {True: [], False: []}, {True: [], False: []}
    for at in range(0, len(turns), 4):
        count, seconds, used, used_by_page, length = ({True: 0, False: 0} for _ in range(5))
        for has_pages, begin, end, processor, page in turns[at:at + 4]:
            steps, spent = steps_within(times, begin, end)
            count[has_pages] += steps
            seconds[has_pages] += spent
            used[has_pages] += processor
            used_by_page[has_pages] += page
            length[has_pages] += end - begin
        if not all(count.values()):
            continue
        for kind in (True, False):
            step_s[kind].append(seconds[kind] / count[kind])
            cpu_s[kind].append(used[kind] / length[kind] * step_s[kind][-1])
            page_s[kind].append(used_by_page[kind] / length[kind] * step_s[kind][-1])
        of_page.append(100 * page_s[True][-1] / cpu_s[False][-1])
        slower.append(100 * (step_s[True][-1] / step_s[False][-1] - 1))
        cpu.append(100 * (cpu_s[True][-1] / cpu_s[False][-1] - 1))
    if not slower:
        sys.exit("no turn held two steps: more --seconds are needed")
    result = {"pages": options.pages, "turns": options.turns, "seconds": options.seconds, "step_s_without": round(statistics.median(step_s[False]), 4), "step_s_with": round(statistics.median(step_s[True]), 4)}
    result["slower_percent"], result["slower_interval"] = median_and_interval(slower)
    result["cpu_percent"], result["cpu_interval"] = median_and_interval(cpu)
    result["page_cpu_percent"], result["page_cpu_interval"] = median_and_interval(of_page)
    result["page_cpu_ms"], result["page_cpu_ms_without"] = (round(1000 * statistics.median(page_s[kind]), 3) for kind in (True, False))
    result["viewers_cpu_percent"] = round(100 * viewers_s / sum(end - begin + SETTLE_S for has_pages, begin, end, *_ in turns if has_pages), 1)
    return {**result, "slower_percent_of_turns": [round(one, 2) for one in slower], "cpu_percent_of_turns": [round(one, 2) for one in cpu], "cpu_s_per_step": round(statistics.median(cpu_s[False]), 4),
            "first_view_s": [round(one, 3) for one in views_s]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prl")
    parser.add_argument("model")
    parser.add_argument("shape")
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--turns", type=int, default=30, help="of each kind; an odd number is one more")
    parser.add_argument("--seconds", type=float, default=5, help="of a turn")
    parser.add_argument("--nice", type=int, default=19, help="priority of the pages")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.turns += options.turns % 2
    ensure_model(options.prl, os.path.abspath(options.model), options.shape)
    with tempfile.TemporaryDirectory(prefix="prl-bench-page-") as out:
        log = open(os.path.join(out, "console"), "w+b")
        run = subprocess.Popen([options.prl, "rl", "--model.name", warm_up(options.prl, os.path.abspath(options.model), out), "--output-dir", os.path.join(out, "run"), "--max-steps", "1000000", "--dashboard.port", "0", "--trainer.optim.lr", "1e-12",
                                *OPTIONS], stdout=log, stderr=subprocess.STDOUT)
        viewers = None
        try:
            def page():
                if run.poll() is not None:
                    sys.exit(f"the run ended:\n{open(log.name, errors='replace').read()[-2000:]}")
                return re.search(r"page: http://127\.0\.0\.1:(\d+)/", open(log.name, errors="replace").read())
            port = int(wait(page, "the page").group(1))
            wait(lambda: page() and len(step_times(f"{out}/run")) >= 20, "twenty steps")
            views = [VIEWS[number % len(VIEWS)] for number in range(options.pages)]
            viewers = subprocess.Popen([sys.executable, "-c", PAGES, str(port), str(RUNS_S), str(options.nice), json.dumps(views)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            turns, viewers_s = [], 0.0
            for turn in range(2 * options.turns):
                page()
                has_pages = turn % 4 in (1, 2)
                viewers.stdin.write("open\n" if has_pages else "close\n")
                viewers.stdin.flush()
                viewers_s = float(viewers.stdout.readline())
                time.sleep(SETTLE_S)
                begin, used, used_by_page = time.time(), cpu_seconds(run.pid), page_seconds(run.pid)
                time.sleep(options.seconds)
                turns.append((has_pages, begin, time.time(), cpu_seconds(run.pid) - used, page_seconds(run.pid) - used_by_page))
            viewers.stdin.write("close\n")
            viewers.stdin.flush()
            viewers_s = float(viewers.stdout.readline())
            times = step_times(f"{out}/run")
            views_s = sorted(first_view(port) for _ in range(5))
        finally:
            if viewers:
                viewers.kill()
                viewers.wait()
            run.terminate()
            run.wait(60)
    print(json.dumps(result := summary(options, turns, times, viewers_s, views_s)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
