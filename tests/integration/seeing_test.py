#!/usr/bin/env python3
"""What people see of a run beside its page: the console in both shapes, trackers that are killed, heartbeats, the trainer's /metrics."""
import contextlib
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

import harness
from harness import check, prl

sys.path[:0] = [str(harness.ROOT / "python"), str(harness.ROOT / "python/tests")]
import venvs  # noqa: E402
from prl_tracker import tensorboard  # noqa: E402

STEP_LINE = re.compile(r"Step (\d+)/(\d+) \| Reward: -?\d+\.\d{4} \| Loss: -?\d+\.\d{4} \| Entropy: \d+\.\d{4} \| Mismatch KL: \d+\.\d{4} \| [\d,]+ tokens/s \| Async Level: \d+ \| ETA ")


def test_the_console_is_the_same_in_both_shapes():
    with harness.workspace("console") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=4)
        for shape in ("colocated", "single_node"):
            for flags, saves in (([], False), (["--ckpt"], True)):
                out = folder / f"{shape}-{saves}"
                if shape == "single_node":
                    if not saves:
                        continue
                    flags = [*flags, "--deployment.type", shape, "--inference.server.port", harness.free_port()]
                _, text = prl("rl", "@", config, "--output-dir", out, "--no-dashboard", *flags)
                steps = [(int(a), int(b)) for a, b in STEP_LINE.findall(text)]
                check(steps == [(step, 4) for step in range(1, 5)], f"{shape}: steps {steps} in\n{text[-3000:]}")
                check(("checkpoints are off: nothing will be saved" in text) == (not saves), f"{shape}, saving {saves}: {text[:2000]}")
                weights = re.search(r"weights: (\S+); talk to them: prl chat --model.name (\S+)", text)
                check(bool(weights) == saves, f"{shape}, saving {saves}: {text[-1500:]}")
                check(not saves or pathlib.Path(weights.group(2), "config.json").exists(), f"{weights and weights.group(2)} is no model")


def test_what_a_stop_loses_is_said():
    with harness.workspace("unsaved") as folder:
        config, log = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=100_000), folder / "rl.log"
        with harness.running("rl", "@", config, "--output-dir", folder / "out", "--no-dashboard", log=log) as process:
            harness.wait_until(lambda: "Step 2/" in log.read_text() or process.poll() is not None, 120, "two steps")
            process.send_signal(signal.SIGINT)
            check(process.wait(360) == 130, log.read_text()[-2000:])
        text = log.read_text()
        check(text.index("the weights of all steps so far are lost") < text.index("rl stopped"), text[-2000:])
        harness.sft_data(folder / "data.jsonl", 32)
        with harness.running("sft", "--model.name", harness.warm_model(), "--data.name", folder / "data.jsonl", "--data.seq-len", 128, "--data.batch-size", 2, "--max-steps", 100_000, "--output-dir", folder / "sft",
                             "--no-dashboard", log=log) as process:
            harness.wait_until(lambda: (folder / "sft/metrics.jsonl").exists() or process.poll() is not None, 120, "a step")
            process.send_signal(signal.SIGINT)
            check(process.wait(360) == 130, log.read_text()[-2000:])
        text = log.read_text()
        check("checkpoints are off: nothing will be saved" in text and text.index("the weights of all steps so far are lost") < text.index("sft stopped"), text[-2000:])


def test_collecting_is_shown_while_no_step_ends():
    with harness.workspace("progress") as folder:
        config, log = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=100_000), folder / "rl.log"
        with harness.running("rl", "@", config, "--output-dir", folder / "out", "--no-dashboard", "--log.interval", "0.05", log=log) as process:
            harness.wait_until(lambda: "collecting batch" in log.read_text() or process.poll() is not None, 120, "a line of progress")
            check(process.poll() is None, log.read_text()[-2000:])


def on_terminal(env, *arguments):
    """What prl writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([harness.PRL, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, **env})
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    check(process.wait(180) == 0, text[-2000:])
    return text.decode()


def test_colours_and_json_logs():
    with harness.workspace("lines") as folder:
        data = harness.sft_data(folder / "data.jsonl", 16)
        command = ["sft", "--model.name", harness.warm_model(), "--data.name", data, "--data.batch-size", 2, "--data.seq-len", 128, "--max-steps", 1, "--no-dashboard", "--output-dir"]
        for number, (env, is_coloured) in enumerate((({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False))):
            text = on_terminal(env, *command, folder / f"run{number}")
            check("Step 1/1" in text and ("\x1b[" in text) == is_coloured, f"{env}: {text[:1000]!r}")
        out = folder / "json"
        _, console = prl(*command, out, "--log.json-logging")
        lines = [json.loads(line) for line in (out / "logs/latest/sft.log").read_text().splitlines()]
        check(any("Step 1/1" in line["message"] and line["level"].upper() == "SUCCESS" for line in lines), f"{lines}")
        for line in lines:
            check({"timestamp", "level", "message", "module", "function", "line"} <= set(line) and not any(isinstance(value, dict) for key, value in line.items() if key != "extra"), f"{line}")
        check(all(line.startswith("{") for line in console.splitlines() if "Step" in line), console[-1000:])


def tracker_pids(settings):
    """Processes of prl_tracker that read these settings."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(settings).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def event_rows(run):
    """(role, step) of every row in the event files."""
    rows = []
    for path in sorted(run.glob("tensorboard/*/events*")):
        for event, _ in tensorboard.records(path.read_bytes()):
            if at := tensorboard.time_and_step(event):
                rows.append((path.parent.name, at[1]))
    return sorted(rows)


def test_a_tracker_that_is_killed_loses_nothing():
    with harness.workspace("tracker") as folder:
        config, log, out = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=100_000), folder / "rl.log", folder / "out"
        settings = out.resolve() / "trackers/tensorboard.json"
        with harness.running("rl", "@", config, "--output-dir", out, "--no-dashboard", "--tensorboard", log=log) as process:
            killed = set()
            for _ in range(10):
                def one():
                    check(process.poll() is None, log.read_text()[-2000:])
                    return [pid for pid in tracker_pids(settings) if pid not in killed]
                pid = harness.wait_until(one, 120, "the tracker's process")[0]
                before = len(event_rows(out))
                harness.wait_until(lambda: len(event_rows(out)) > before, 120, "a row in the event files")
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            process.send_signal(signal.SIGINT)
            check(process.wait(200) == 130, log.read_text()[-2000:])
        rows = sorted((row["role"], row["step"]) for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
        check(event_rows(out) == rows, f"the event files hold {len(event_rows(out))} rows, metrics.jsonl {len(rows)}")
        check(log.read_text().count("it is started again") == 10, log.read_text()[-3000:])


def check_by_prometheus(port):
    """The page of metrics as prometheus_client reads it."""
    python = venvs.ready("trackers")
    if not python:
        return print("prometheus_client is not installed (python3 python/tests/venvs.py trackers): its parser has not read /metrics")
    read = """
import json, sys, urllib.request
from prometheus_client.parser import text_string_to_metric_families
text = urllib.request.urlopen(sys.argv[1], timeout=60).read().decode()
print(json.dumps({family.name: [family.type, family.documentation, [sample.value for sample in family.samples]] for family in text_string_to_metric_families(text)}))"""
    done = subprocess.run([python, "-c", read, f"http://127.0.0.1:{port}/metrics"], capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, done.stderr)
    found = json.loads(done.stdout)
    wanted = ["step", "loss", "throughput_tokens_per_sec", "last_step_timestamp_seconds", "grad_norm", "peak_memory_gib", "learning_rate", "mfu_percent", "entropy", "mismatch_kl", "kl_ent_ratio"]
    for name in wanted:
        kind, text, values = found.get(f"trainer_{name}", [None, "", []])
        check(kind == "gauge" and text and len(values) == 1, f"trainer_{name}: {kind}, {text!r}, {values}")


def test_heartbeats_and_the_trainers_metrics():
    with harness.workspace("services") as folder, harness.heartbeats(first_status=500) as (url, beats):
        config, log, port = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=100_000), folder / "rl.log", harness.free_port()
        with harness.running("rl", "@", config, "--output-dir", folder / "out", "--no-dashboard", "--trainer.heartbeat.url", url,
                             "--trainer.metrics-server.port", port, log=log) as process:
            def gauges():
                check(process.poll() is None, log.read_text()[-2000:])
                with contextlib.suppress(OSError):
                    return dict(line.split(" ") for line in harness.request(port, "GET", "/metrics")[1].splitlines() if not line.startswith("#"))
                return {}
            shown = harness.wait_until(lambda: (lambda now: now if float(now.get("trainer_step", 0)) >= 2 else None)(gauges()), 120, "two steps in /metrics")
            step = int(float(shown["trainer_step"]))
            row = harness.wait_until(lambda: next((row for row in harness.rows_of(folder / "out/metrics.jsonl") if (row["role"], row["step"]) == ("trainer", step)), None), 60, f"the trainer's row of step {step}")
            check(float(shown["trainer_loss"]) == row["loss/mean"] and float(shown["trainer_throughput_tokens_per_sec"]) == row["perf/throughput"], f"{shown}")
            check_by_prometheus(port)
            check(harness.request(port, "GET", "/health") == (200, "ok\n"), "/health")
            check(harness.request(port, "GET", "/other")[0] == 404, "another path")
            harness.wait_until(lambda: len(beats) >= 2, 60, "heartbeats")
        check(set(beats) == {"/beat"}, f"{beats[:3]}")
        check("answered with status 500" in log.read_text(), log.read_text()[-2000:])


if __name__ == "__main__":
    harness.main(test_the_console_is_the_same_in_both_shapes, test_what_a_stop_loses_is_said, test_colours_and_json_logs, test_collecting_is_shown_while_no_step_ends,
                 test_a_tracker_that_is_killed_loses_nothing, test_heartbeats_and_the_trainers_metrics)
