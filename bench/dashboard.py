#!/usr/bin/env python3
"""What the page of a run costs the run, and how soon it shows something: two runs of `prl rl` side by side, of which one and then the other has pages open.

usage: dashboard.py PRL MODEL_FOLDER SHAPE [--pages N] [--turns N] [--seconds S] [--nice N] [--viewers-on CORES] [--json FILE]; the folder is made when it is missing, of a
SHAPE of models.py. A page is a connection that follows the events and asks what the real one asks (src/dashboard/page): what its view shows when it
is opened, the same again at the pace of that view when there is news (curves take their points from the news), and the list of runs every 3 s. Pages are
in a process of their own on the cores of their run, of the lowest priority unless --nice says otherwise, or on the cores that --viewers-on names: they
stand for browsers, which are elsewhere as a rule; viewers_cpu_percent is what they take of one processor.

Each run has half of the cores. What else a machine does slows both alike, so that the ratio of their steps in the same seconds changes far less than
the steps do. The pages change sides after every turn; two turns give one ratio, in which it cancels that one half of the cores may be the faster.
Counted are the steps that lie within a turn, by the times of metrics.jsonl, after a moment for the change. The learning rate is 1e-12, and all replies
have one length. Prints one JSON object: slower_percent is the mean over those ratios, slower_interval its 95% interval (bootstrap),
cpu_percent the same of the processor time that a run takes per step. page_cpu_percent is the processor time
of the page's own threads per step with pages, in percent of what a run takes per step without: it counts what the page does and nothing else;
page_cpu_ms and page_cpu_ms_without are the milliseconds.
"""
import argparse
import http.client
import json
import math
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


def mean_and_interval(values):
    """The mean, and its 95% interval by the bootstrap."""
    chance = random.Random(1)
    means = sorted(statistics.mean(chance.choices(values, k=len(values))) for _ in range(10_000))
    return round(statistics.mean(values), 2), [round(means[250], 2), round(means[-251], 2)]


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


class Run:
    """A run on some of the cores, and the process of its pages. Leaving the context ends both."""

    def __init__(self, options, model, folder, cores):
        self.out = folder
        self.pages = self.log = None
        os.makedirs(folder)
        self.log = open(os.path.join(folder, "console"), "w+b")
        self.pin = ["taskset", "-c", ",".join(map(str, cores))]
        self.process = subprocess.Popen([*self.pin, options.prl, "rl", "--model.name", model, "--output-dir", os.path.join(folder, "run"), "--max-steps", "1000000", "--dashboard.port", "0", "--trainer.optim.lr", "1e-12",
                                         *OPTIONS], stdout=self.log, stderr=subprocess.STDOUT)
        self.viewers_s = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pages:
            self.pages.kill()
            self.pages.wait()
        self.process.terminate()
        self.process.wait(60)
        self.log.close()

    def address(self):
        if self.process.poll() is not None:
            sys.exit(f"a run ended:\n{open(self.log.name, errors='replace').read()[-2000:]}")
        return re.search(r"page: http://127\.0\.0\.1:(\d+)/", open(self.log.name, errors="replace").read())

    def times(self):
        return step_times(os.path.join(self.out, "run"))

    def begin(self, options):
        self.port = int(wait(self.address, "the page").group(1))
        wait(lambda: self.address() and len(self.times()) >= 20, "twenty steps")
        views = [VIEWS[number % len(VIEWS)] for number in range(options.pages)]
        pin = ["taskset", "-c", options.viewers_on] if options.viewers_on else self.pin
        self.pages = subprocess.Popen([*pin, sys.executable, "-c", PAGES, str(self.port), str(RUNS_S), str(options.nice), json.dumps(views)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def show(self, is_open):
        self.address()
        self.pages.stdin.write("open\n" if is_open else "close\n")
        self.pages.stdin.flush()
        self.viewers_s = float(self.pages.stdout.readline())

    def used(self):
        """Seconds of processor time: all of the run's, and its page's."""
        return cpu_seconds(self.process.pid), page_seconds(self.process.pid)


def measure_turns(options, runs):
    """Of each turn: (number of the run with pages, begin, end, [(processor, page) seconds of each run])."""
    turns = []
    for turn in range(options.turns):
        with_pages = turn % 2
        for number in (1 - with_pages, with_pages):  # closed before others open
            runs[number].show(number == with_pages)
        time.sleep(SETTLE_S)
        begin, before = time.time(), [run.used() for run in runs]
        time.sleep(options.seconds)
        turns.append((with_pages, begin, time.time(), [(now[0] - then[0], now[1] - then[1]) for now, then in zip([run.used() for run in runs], before)]))
    for run in runs:
        run.show(False)
    return turns


def summary(options, turns, times, viewers_s, views_s):
    step_s, cpu_s, page_s = ({True: [], False: []} for _ in range(3))
    slower_of, cpu_of = [], []  # of each turn, as logarithms
    for with_pages, begin, end, used in turns:
        counted = [steps_within(of_run, begin, end) for of_run in times]
        if not all(count for count, _ in counted):
            slower_of.append(None), cpu_of.append(None)
            continue
        for number, (count, seconds) in enumerate(counted):
            has_pages = number == with_pages
            step_s[has_pages].append(seconds / count)
            cpu_s[has_pages].append(used[number][0] / (end - begin) * seconds / count)
            page_s[has_pages].append(used[number][1] / (end - begin) * seconds / count)
        slower_of.append(math.log(step_s[True][-1] / step_s[False][-1]))
        cpu_of.append(math.log(cpu_s[True][-1] / cpu_s[False][-1]))
    slower, cpu = ([100 * math.expm1((values[at] + values[at + 1]) / 2) for at in range(0, len(values) - 1, 2) if None not in values[at:at + 2]]
                   for values in (slower_of, cpu_of))
    if not slower:
        sys.exit("no two turns in a row held two steps of each run: more --seconds are needed")
    result = {"pages": options.pages, "turns": options.turns, "seconds": options.seconds, "step_s_without": round(statistics.median(step_s[False]), 4), "step_s_with": round(statistics.median(step_s[True]), 4)}
    result["slower_percent"], result["slower_interval"] = mean_and_interval(slower)
    result["cpu_percent"], result["cpu_interval"] = mean_and_interval(cpu)
    result["page_cpu_percent"], result["page_cpu_interval"] = mean_and_interval([100 * of_page / of_run for of_page, of_run in zip(page_s[True], cpu_s[False])])
    result["page_cpu_ms"], result["page_cpu_ms_without"] = (round(1000 * statistics.median(page_s[kind]), 3) for kind in (True, False))
    result["viewers_cpu_percent"] = round(100 * viewers_s / sum(end - begin + SETTLE_S for _, begin, end, _ in turns), 1)
    return {**result, "slower_percent_of_turns": [round(one, 2) for one in slower], "cpu_percent_of_turns": [round(one, 2) for one in cpu], "cpu_s_per_step": round(statistics.median(cpu_s[False]), 4),
            "first_view_s": [round(one, 3) for one in views_s]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prl")
    parser.add_argument("model")
    parser.add_argument("shape")
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--turns", type=int, default=30, help="an odd number is one more")
    parser.add_argument("--seconds", type=float, default=10, help="of a turn")
    parser.add_argument("--nice", type=int, default=19, help="priority of the pages")
    parser.add_argument("--viewers-on", help="cores of the pages, as taskset takes them; default: those of their run")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.turns += options.turns % 2
    options.prl = os.path.abspath(options.prl)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two runs side by side need two cores, and there is one")
    half = len(cores) // 2
    ensure_model(options.prl, os.path.abspath(options.model), options.shape)
    with tempfile.TemporaryDirectory(prefix="prl-bench-page-") as out:
        model = warm_up(options.prl, os.path.abspath(options.model), out)
        with Run(options, model, os.path.join(out, "0"), cores[:half]) as first, Run(options, model, os.path.join(out, "1"), cores[half:2 * half]) as second:
            runs = [first, second]
            for run in runs:
                run.begin(options)
            turns = measure_turns(options, runs)
            times = [run.times() for run in runs]
            views_s = sorted(first_view(first.port) for _ in range(5))
    print(json.dumps(result := summary(options, turns, times, sum(run.viewers_s for run in runs), views_s)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
