#!/usr/bin/env python3
"""What a run tells of itself while it runs, and what it is told: spans and traces, token values, load of the engines, orders of its page."""
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import harness
from harness import check, prl

sys.path.insert(0, str(harness.ROOT / "python/tests"))
import venvs  # noqa: E402

READER = harness.ROOT / "tests/integration/trace_reader"


def spans_of(run):
    """lane -> spans that the processes kept in the run's folder."""
    lanes = {}
    for path in (run / "spans").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            span = json.loads(line)
            check(span["end"] >= span["begin"], f"{path}: {span}")
            lanes.setdefault(span["lane"], []).append(span)
    return lanes


def check_trace(path, wanted_lanes, num_processes):
    """A trace as Chrome's description of the format has it: events of known kinds, spans of a thread nested or apart, asynchronous ones closed."""
    events = json.loads(path.read_text())["traceEvents"]
    names, lanes, threads, open_ids = {}, {}, {}, set()
    for event in events:
        kind, thread = event["ph"], (event["pid"], event["tid"])
        if kind == "M":
            (names if event["name"] == "process_name" else lanes)[thread] = event["args"]["name"]
        elif kind == "X":
            check(event["dur"] >= 0 and event["ts"] >= -0.01 and math.isfinite(event["ts"]), f"{event}")
            threads.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"], event["name"], event["args"].get("step")))
        elif kind in "be":
            key = (event["pid"], event["cat"], event["id2"]["local"])
            check((key in open_ids) == (kind == "e"), f"{event}")
            (open_ids.remove if kind == "e" else open_ids.add)(key)
        else:
            raise harness.Failure(f"an event of kind {kind}")
    check(not open_ids, f"{len(open_ids)} spans do not end")
    check(len(names) == num_processes, f"processes {names}")
    check(set(wanted_lanes) <= set(lanes.values()), f"lanes {sorted(lanes.values())}, wanted {wanted_lanes}")
    for thread, spans in threads.items():
        ends = []
        for begin, end, name, _ in sorted(spans, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin + 0.01:
                ends.pop()
            check(not ends or end <= ends[-1] + 0.01, f"{lanes[thread]}: {name} begins within a span that ends before it")
            ends.append(end)
    return {lanes[thread]: spans for thread, spans in threads.items()}


def check_by_perfetto(path, found, num_processes):
    """Perfetto's trace processor, asked by its own Python API, finds every span that the strict reader found, and no error: the native program where it is
    (PRL_TRACE_PROCESSOR, PATH), else its WebAssembly build in chromium. `found` is of check_trace."""
    python = venvs.ready("traces")
    shell = os.environ.get("PRL_TRACE_PROCESSOR") or shutil.which("trace_processor_shell") or (shutil.which("chromium") and READER / "trace_processor_shell")
    if not python or not shell:
        return print(f"Perfetto's trace processor has not read the trace: it needs {'chromium' if python else 'the environment `traces` (python3 python/tests/venvs.py traces)'}")
    env = {**os.environ, "PATH": f"{pathlib.Path(python).parent}:{os.environ['PATH']}"}
    done = subprocess.run([python, READER / "read_trace.py", path, shell], env=env, capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, done.stderr[-3000:])
    read = json.loads(done.stdout)
    check(not read["problems"], f"it met problems: {read['problems']}")
    check(len(read["processes"]) == num_processes, f"it found the processes {read['processes']}")
    # Moments are written in microseconds with three digits; theirs are nanoseconds from the first.
    first = min(span[0] for spans in found.values() for span in spans)
    ours = sorted((lane, name, step, round((at - first) * 1000), round((end - at) * 1000)) for lane, spans in found.items() for at, end, name, step in ((*span[:3], str(span[3])) for span in spans))
    begin = min(one["ts"] for one in read["spans"])
    theirs = sorted((one["lane"], one["name"], str(one["step"]), one["ts"] - begin, one["dur"]) for one in read["spans"])
    check(len(theirs) == len(ours), f"it found {len(theirs)} spans of {len(ours)}")
    for mine, other in zip(ours, theirs):
        check(mine[:3] == other[:3] and abs(mine[3] - other[3]) <= 2 and abs(mine[4] - other[4]) <= 2, f"{mine} is {other} there")
    rollouts = [one for one in read["asynchronous"] if one["name"] == "rollout"]
    check(len(rollouts) >= 48 and all(one["dur"] > 0 and one["process"] for one in rollouts), f"{len(rollouts)} rollouts: {rollouts[:3]}")
    print(f"Perfetto's trace processor ({pathlib.Path(shell).name}) found the {len(ours)} spans of threads and {len(rollouts)} rollouts")


def test_a_trace_has_all_roles_on_one_clock():
    with harness.workspace("trace") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=3)
        lanes = ["trainer", "rows", "orchestrator", "engine", "engine steps", "weights", "cpu of the trainer", "cpu of the engine", "rollouts of reverse-text", "environment/reverse-text"]
        for shape, processes in (("colocated", 1), ("single_node", 3)):
            flags = ["--deployment.type", shape, "--inference.server.port", harness.free_port()] if shape == "single_node" else []
            out, trace = folder / shape, folder / f"trace-{shape}"
            prl("rl", "@", config, "--output-dir", out, "--no-dashboard", "--trainer.trace-path", trace, "--trainer.memory-profiler-path", folder / f"memory-{shape}", *flags)
            found = check_trace(trace / "trace.json", lanes, processes)
            check_by_perfetto(trace / "trace.json", found, processes)
            # One clock: the engines take a version after the trainer has begun to publish it, in another process too.
            published = {step: begin for begin, _, name, step in found["trainer"] if name == "publishes weights"}
            taken = {step: begin for begin, _, _, step in found["weights"] if step > 0}
            check(set(published) == {1, 2, 3} and taken and all(begin >= published[step] for step, begin in taken.items()), f"{shape}: published {published}, taken {taken}")
            steps = [name for _, _, name, _ in found["trainer"]]
            check(steps.count("forward and backward") == 3 and steps.count("optimizer") == 3 and steps.count("waits for a batch") >= 3, f"{shape}: {steps}")
            kept = spans_of(out)
            check({"trainer", "orchestrator", "engine", "environment/reverse-text"} <= set(kept), f"{shape}: the run folder has the lanes {sorted(kept)}")
            check("rows" not in kept, "fine spans are in the trace alone")
            snapshots = [json.loads((folder / f"memory-{shape}/step_{step}/rank_0.json").read_text()) for step in (1, 2, 3)]
            check(all(one["peak_bytes"] >= one["bytes_in_use"] > 0 for one in snapshots), f"{snapshots}")


def test_token_exports_hold_the_trainers_numbers():
    with harness.workspace("exports") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=2)
        out = folder / "out"
        prl("rl", "@", config, "--output-dir", out, "--no-dashboard", "--trainer.enable-token-export", "--orchestrator.log-tokens")
        rows = harness.metrics(out)
        for step in (1, 2):
            check((out / f"token_exports/step_{step}/STABLE").exists(), f"step {step} is not marked")
            records = [json.loads(line) for line in (out / f"token_exports/step_{step}/rank_0.jsonl").open()]
            tokens = [json.loads(line) for line in (out / f"rollouts/step_{step}/train_tokens.jsonl").open()]
            values = {key: [v for one in records for v, m in zip(one[key], one["loss_mask"]) if m] for key in ("mismatch_kl", "entropy", "importance_ratio")}
            for key in ("mismatch_kl", "entropy"):
                mean = sum(values[key]) / len(values[key])
                check(abs(mean - rows[step][f"{key}/all/mean"]) <= 1e-5 * max(1, abs(mean)), f"step {step}: {key} is {mean} in the export, {rows[step][f'{key}/all/mean']} in the metrics")
            # The same weights sampled and train on the first step: the two agree bit for bit.
            check(step > 1 or set(values["importance_ratio"]) == {1.0}, f"ratios {set(values['importance_ratio'])}")
            known = {tuple(one["token_ids"]): one for one in tokens}
            for one in records:
                mine = known[tuple(one["token_ids"])]
                check([a for a, m in zip(one["inference_logprobs"], one["loss_mask"]) if m] == [a for a, m in zip(mine["inference_logprobs"], mine["loss_mask"]) if m], "the sampler's log-probabilities differ")
                check(all(0 <= v < step + 1 for v, m in zip(mine["policy_versions"], mine["loss_mask"]) if m), f"versions {mine['policy_versions']}")
                check(all(v == -1 for v, m in zip(mine["policy_versions"], mine["loss_mask"]) if not m), "a token of the prompt has a version")


def test_the_engines_load_is_in_the_metrics():
    with harness.workspace("load") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=3)
        for shape in ("colocated", "single_node"):
            flags = ["--deployment.type", shape, "--inference.server.port", harness.free_port()] if shape == "single_node" else []
            prl("rl", "@", config, "--output-dir", folder / shape, "--no-dashboard", *flags)
            rows = [json.loads(line) for line in (folder / shape / "metrics.jsonl").open()]
            last = [row for row in rows if row.get("role") == "orchestrator"][-1]
            for key in ("num_requests_running/mean", "num_requests_running/max", "num_requests_waiting/mean", "kv_cache_usage/mean"):
                check(last.get(f"inference/all/{key}", -1) >= 0, f"{shape}: no {key} in {sorted(last)}")
            # Environments have a log of their own, native ones too; it counts the rollouts that ended.
            log = (folder / shape / "logs/latest/envs/train/reverse-text.log").read_text()
            ended = sum(map(int, re.findall(r"^\d\d:\d\d:\d\d    INFO (\d+) rollouts ended: 0 failed", log, re.M)))
            check("INFO reverse-text is ready" in log and ended >= 48, f"{shape}: {log}")


def order(port, name, key=None, headers=None):
    return harness.request(port, "POST", f"/api/control/{name}", headers={**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})})[0]


def trained_steps(out):
    return max((row["step"] for row in harness.rows_of(out / "metrics.jsonl") if row.get("role") in ("trainer", "sft")), default=0)


def test_the_page_controls_the_run():
    with harness.workspace("control") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=100_000)
        for shape in ("colocated", "single_node"):
            flags = ["--deployment.type", shape, "--inference.server.port", harness.free_port()] if shape == "single_node" else []
            out, log = folder / shape, folder / f"{shape}.log"
            with harness.running("rl", "@", config, "--output-dir", out, "--dashboard.port", 0, "--dashboard.control", "--ckpt.interval", 50_000, *flags, log=log) as process:
                def alive(value):
                    check(process.poll() is None, log.read_text()[-2000:])
                    return value
                port = int(harness.wait_until(lambda: alive(re.search(r"page: http://127\.0\.0\.1:(\d+)/", log.read_text()) if log.exists() else None), 60, "the page").group(1))
                harness.wait_until(lambda: alive(trained_steps(out) >= 2), 120, "two steps")
                key = (out / "control.key").read_text().strip()
                check((out / "control.key").stat().st_mode & 0o077 == 0, "others can read the key")
                check("control.key" in log.read_text() and key not in log.read_text(), "the key is in the log")
                for name in ("pause", "resume", "checkpoint", "stop"):
                    check(order(port, name) == 401 and order(port, name, "wrong") == 401, f"{name} without the key")
                check(harness.request(port, "GET", "/api/control/pause")[0] == 405, "an order by GET")
                check(order(port, "pause", key) == 200, "pause")
                check(harness.request(port, "GET", "/api/control")[1] == {"is_enabled": True, "is_paused": True}, "state")
                harness.wait_until(lambda: alive("paused" in log.read_text() or any("paused before step" in path.read_text() for path in (out / "logs").glob("*.log"))), 60, "the trainer to pause")
                at = trained_steps(out)
                harness.wait_until(lambda: alive(any("rollouts collected" in path.read_text() for path in (out / "logs").rglob("*.log"))), 60, "the orchestrator to pause")
                check(trained_steps(out) <= at + 1, f"a paused run trained from step {at} to {trained_steps(out)}")
                at = trained_steps(out)
                check(order(port, "checkpoint", key) == 200, "checkpoint")
                check(order(port, "resume", key) == 200, "resume")
                harness.wait_until(lambda: alive(trained_steps(out) >= at + 2), 120, "further steps")

                def whole():
                    return [path for path in (out / "checkpoints").glob("step_*") if (path / "trainer").is_dir() and (path / "orchestrator").is_dir()]
                harness.wait_until(lambda: alive(whole()), 120, "a whole checkpoint")
                check(order(port, "stop", key) == 200, "stop")
                check(process.wait(360) == 0, log.read_text()[-2000:])
            prl("rl", "@", config, "--output-dir", out, "--no-dashboard", "--ckpt.interval", 50_000, "--ckpt.resume-step", -1, "--max-steps", trained_steps(out) + 2, *flags)
            harness.check_rows(out)


def test_fine_tuning_says_how_far_it_is():
    with harness.workspace("sft") as folder:
        data, out, log = folder / "data.jsonl", folder / "out", folder / "sft.log"
        harness.sft_data(data, 64)
        common = ["sft", "--model.name", harness.warm_model(), "--data.name", data, "--data.batch-size", 4, "--data.seq-len", 128, "--output-dir", out]
        _, text = prl(*common, "--max-steps", 3, "--no-dashboard")
        check(len(re.findall(r"Step ([123])/3 \| Time: .* \| ETA \d", text)) == 3, text[-2000:])
        with harness.running(*common[:-1], folder / "long", "--max-steps", 100_000, "--dashboard.port", 0, "--dashboard.control", "--dashboard.control-api-key", "k", "--ckpt", "--log.interval", "0.01", log=log) as process:
            port = int(harness.wait_until(lambda: re.search(r"page: http://127\.0\.0\.1:(\d+)/", log.read_text()) if log.exists() else None, 60, "the page").group(1))
            harness.wait_until(lambda: trained_steps(folder / "long") >= 2 or process.poll() is not None, 120, "two steps")
            check(order(port, "checkpoint", "k") == 200, log.read_text()[-2000:])
            harness.wait_until(lambda: list((folder / "long/checkpoints").glob("step_*/trainer")) or process.poll() is not None, 120, "a checkpoint")
            harness.wait_until(lambda: "training step " in log.read_text() or process.poll() is not None, 120, "a line about a step under way")
            check(order(port, "stop", "k") == 200, "stop")
            check(process.wait(360) == 0, log.read_text()[-2000:])


def test_pictures_are_drawn():
    with harness.workspace("plot") as folder:
        run = folder / "run"
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "role": "trainer", "time": 1.0 + s, "loss/mean": math.sin(s / 5)}) + "\n" for s in range(100)))
        prl("plot", run, "--metric", "loss", "--out", folder / "loss.png")
        check((folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n"), "no PNG file")
        prl("plot", run, "--metric", "loss", "--out", folder / "loss.gif", expect=1)


def test_the_logs_in_tmux():
    if not shutil.which("tmux"):
        raise harness.Skip("tmux is not installed")
    with harness.workspace("tmux") as folder:
        (folder / "out/logs/latest").mkdir(parents=True)
        (folder / "out/logs/latest/trainer.log").write_text("a line of the trainer\n")
        env = {**os.environ, "TMUX_TMPDIR": str(folder), "SHELL": "/bin/sh"}
        env.pop("TMUX", None)

        def run(*command):
            return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=60)
        script = harness.ROOT / "scripts/tmux.sh"
        try:
            for name, flags, wanted in (("plain", [], ["RL", "Logs", "SUCCESS", "Monitor"]), ("agent", ["-a", "codex"], ["Launcher", "Logs", "SUCCESS", "Agent"])):
                made = run(script, "-s", name, "-o", folder / "out", *flags)
                check(made.returncode == 0, made.stderr)
                windows = run("tmux", "list-windows", "-t", name, "-F", "#{window_name}").stdout.split()
                check(windows == wanted, f"{name}: windows {windows}")
                panes = run("tmux", "list-panes", "-t", f"{name}:Logs", "-F", "#{pane_title}").stdout.split()
                check(panes == ["Trainer", "Orchestrator", "Envs", "Inference"], f"{name}: panes {panes}")
                harness.wait_until(lambda: "a line of the trainer" in run("tmux", "capture-pane", "-p", "-t", f"{name}:Logs.0").stdout, 60, "the trainer's log in its pane")
            check(run(script, "-s", "plain", "-o", folder / "out").returncode == 0, "a session that is there")
            check(run(script, "-a", "other").returncode == 1 and run(script, "-s").returncode == 1, "wrong arguments")
        finally:
            run("tmux", "kill-server")


if __name__ == "__main__":
    harness.main(test_the_logs_in_tmux, test_a_trace_has_all_roles_on_one_clock, test_token_exports_hold_the_trainers_numbers, test_the_engines_load_is_in_the_metrics,
                 test_the_page_controls_the_run, test_fine_tuning_says_how_far_it_is, test_pictures_are_drawn)
