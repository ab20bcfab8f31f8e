#!/usr/bin/env python3
"""prl_tracker: what it hands over is read back by the trackers' own readers, each row once however often the process is killed.

    python/tests/test_trackers.py [CLASS.TEST]...      those that need packages are skipped without the environment `trackers` (venvs.py)
"""

import http.server
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import venvs
from wandb_stand_in import WandbStandIn

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from prl_tracker import follow, tensorboard  # noqa: E402

PATIENCE_S = 240  # reached only by a test that fails
STEPS = 60
# Clients that take seconds of CPU time to start are killed once or twice; PRL_TRACKER_KILLS=10 is the whole test.
KILLS = int(os.environ.get("PRL_TRACKER_KILLS", 0))


def read_by(python, program, *arguments):
    """What a program of the official reader prints as JSON."""
    done = subprocess.run([python, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """A run folder whose metrics grow, and a tracker's process that may be killed and started again."""

    def __init__(self, kind, **settings):
        self.kind = kind
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"prl-tracker-{kind}-"))
        self.settings = self.folder / "settings.json"
        self.settings.write_text(json.dumps({"run_folder": str(self.folder), "name": "test", "metrics": "metrics.jsonl", "config": "configs/rl.json", **settings}))
        self.process = self.control = None
        self.python = sys.executable
        self.env = {}

    def write(self, step):
        with open(self.folder / "metrics.jsonl", "a") as out:
            for role in ("orchestrator", "trainer"):
                row = {"step": step, "role": role, "time": 1.7e9 + step + (0.25 if role == "trainer" else 0), "loss/mean" if role == "trainer" else "reward/all/mean": step / 8, "time/step": 0.5}
                out.write(json.dumps(row) + "\n")

    def write_rollouts(self, step):
        """Ten rollouts of a step, some with characters beyond ASCII."""
        folder = self.folder / f"rollouts/step_{step}"
        folder.mkdir(parents=True)
        with open(folder / "train_rollouts.jsonl", "w") as out:
            for row in range(10):
                out.write(json.dumps({"task": "t", "example_id": row, "prompt": [{"role": "user", "content": f"question {step}.{row} é"}], "completion": [{"role": "assistant", "content": f"answer {step}.{row}"}],
                                      "reward": row / 8, "advantage": row / 8 - 0.5}) + "\n")

    def start(self):
        self.control, theirs = socket.socketpair()
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "PRL_TRACKER_CONTROL": str(theirs.fileno()), "PYTHONDONTWRITEBYTECODE": "1", "TRACKIO_DIR": str(self.folder / "trackio")}
        env.pop("WANDB_API_KEY", None)
        env.update(self.env)
        self.process = subprocess.Popen([self.python, "-m", "prl_tracker", self.kind, str(self.settings)], stdout=subprocess.PIPE, text=True, env=env,
                                        pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self._reap()

    def finish(self, word=b"e"):
        self.control.send(word)
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        self.control.close()
        return self.process.returncode, out

    def _reap(self):
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        self.control.close()

    def close(self):
        if self.process and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class TrackerTest(unittest.TestCase):
    def run_with_kills(self, kind, kills, settings, python=None, pause=(0.0, 0.3), env=None):
        """Writes STEPS steps, every tenth with rollouts, while the tracker is killed again and again; the run, ended."""
        run = Run(kind, **settings)
        self.addCleanup(run.close)
        run.python = python or sys.executable
        run.env = env or {}
        for step in range(10, STEPS + 1, 10):
            run.write_rollouts(step)
        chance = random.Random(kind)
        written = 0
        for kill in range(kills + 1):
            run.start()
            for _ in range(STEPS // (kills + 1)):
                written += 1
                run.write(written)
            if kill < kills:
                time.sleep(chance.uniform(*pause))
                run.kill()
        while written < STEPS:
            written += 1
            run.write(written)
        status, out = run.finish()
        self.assertEqual(status, 0, out + (run.folder / f"logs/tracker_{kind}.log").read_text()[-2000:])
        self.assertIn(f"{2 * STEPS} rows", out)
        return run


class TensorBoardTest(TrackerTest):
    def rows(self, run):
        found = []
        for path in sorted(run.folder.glob("tensorboard/*/events*")):
            for event, _ in tensorboard.records(path.read_bytes()):
                if at := tensorboard.time_and_step(event):
                    found.append((path.parent.name, at[1]))
        return sorted(found)

    def test_ten_kills_lose_and_double_nothing(self):
        run = self.run_with_kills("tensorboard", 10, {"tensorboard": {"path": "tensorboard"}})
        self.assertEqual(self.rows(run), sorted((role, step) for role in ("orchestrator", "trainer") for step in range(1, STEPS + 1)))

    def test_half_a_record_is_cut_off(self):
        run = Run("tensorboard", tensorboard={"path": "tensorboard"})
        self.addCleanup(run.close)
        run.write(1)
        run.start()
        self.assertEqual(run.finish()[0], 0)
        file = next(run.folder.glob("tensorboard/trainer/events*"))
        whole = file.stat().st_size
        with open(file, "ab") as out:
            out.write(tensorboard.record(tensorboard.scalar_event(1.0, 2, {"a": 1.0}))[:-3])
        run.write(2)
        run.start()
        self.assertEqual(run.finish()[0], 0)
        self.assertEqual(file.stat().st_size, whole)
        self.assertEqual(self.rows(run), [(role, step) for role in ("orchestrator", "trainer") for step in (1, 2)])

    def test_the_official_reader(self):
        python = venvs.ready("trackers")
        if not python:
            self.skipTest("the environment `trackers` is not there (python/tests/venvs.py)")
        run = self.run_with_kills("tensorboard", 2, {"tensorboard": {"path": "tensorboard"}})
        read = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0}); a.Reload()
print(json.dumps([[e.step, e.value, e.wall_time] for e in a.Scalars("loss/mean")]))"""
        points = read_by(python, read, run.folder / "tensorboard/trainer")
        self.assertEqual(points, [[step, step / 8, 1.7e9 + step + 0.25] for step in range(1, STEPS + 1)])

    def test_a_resumed_run_takes_its_later_steps_back(self):
        python = venvs.ready("trackers")
        if not python:
            self.skipTest("the environment `trackers` is not there (python/tests/venvs.py)")
        run = Run("tensorboard", tensorboard={"path": "tensorboard"})
        self.addCleanup(run.close)
        for step in (1, 2, 3):
            run.write(step)
        run.start()
        self.assertEqual(run.finish()[0], 0)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        again = [{**row, "time": row["time"] + 100} for row in rows if row["step"] == 2]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [row for row in rows if row["step"] == 1] + again))
        run.start()
        self.assertEqual(run.finish()[0], 0)
        read = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1], purge_orphaned_data=True); a.Reload()
print(json.dumps([[e.step, e.wall_time] for e in a.Scalars("loss/mean")]))"""
        self.assertEqual(read_by(python, read, run.folder / "tensorboard/trainer"), [[1, 1.7e9 + 1.25], [2, 1.7e9 + 102.25]])


def size_of(path):
    """In bytes; 0 of a file that has gone, as a journal does between two looks."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class ClientTest(TrackerTest):
    def setUp(self):
        self.python = venvs.ready("trackers")
        if not self.python:
            self.skipTest("the environment `trackers` is not there (python/tests/venvs.py)")

    def test_wandb_offline(self):
        settings = {"wandb": {"project": "p", "offline": True, "log_extras": {"samples": True, "distributions": True, "interval": 10}}}
        run = self.run_with_kills("wandb", KILLS or 2, settings, self.python, pause=(2.0, 6.0))
        read = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
from prl_tracker import wandb_run
print(json.dumps([[row["step"], row["prl/role"], row.get("loss/mean"), row["_step"]] for path in sorted(pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")) for row in wandb_run.history(path) if "prl/role" in row]))"""
        rows = read_by(self.python, read, run.folder, HERE.parent)
        self.assertEqual(sorted(row[:2] for row in rows), [[step, role] for step in range(1, STEPS + 1) for role in ("orchestrator", "trainer")])
        self.assertEqual([row[2] for row in sorted(rows) if row[1] == "trainer"], [step / 8 for step in range(1, STEPS + 1)])
        self.assertEqual(len({row[3] for row in rows}), len(rows), "steps of the client are used twice")
        self.check_upload(run)

    def check_upload(self, run):
        """wandb's own reader: `wandb sync` of all folders of the run, as docs/trackers.md says, into a server that stands in for wandb's."""
        folders = sorted((run.folder / "wandb").glob("offline-run-*"))
        with WandbStandIn() as server:
            env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a"}
            done = subprocess.run([pathlib.Path(self.python).parent / "wandb", "sync", *folders], env=env, capture_output=True, text=True, timeout=PATIENCE_S, cwd=run.folder)
            said = (done.stdout + done.stderr)[-3000:]
            self.assertEqual(done.returncode, 0, said)
            self.assertEqual(server.problems, [], said)
            run_id = (run.folder / "trackers/wandb_id").read_text()
            rows = [row for row in server.history(run_id) if "prl/role" in row]  # that of final-samples has none
            self.assertEqual(sorted([row["step"], row["prl/role"]] for row in rows), [[step, role] for step in range(1, STEPS + 1) for role in ("orchestrator", "trainer")], said)
            self.assertEqual({row["step"]: row["loss/mean"] for row in rows if "loss/mean" in row}, {step: step / 8 for step in range(1, STEPS + 1)})
            self.assertIn("config.yaml", server.files)
            self.assertEqual(server.complete, {run_id: 0})
            self.check_samples(run, server, said)

    def check_samples(self, run, server, said):
        """Tables of rollouts: each cell as the files have it, as a medium of the row of its step and as an artifact."""
        columns, wanted = ["step", "task", "example_id", "messages", "input_ids", "reward"], {}
        for step in range(10, STEPS + 1, 10):
            for line in (run.folder / f"rollouts/step_{step}/train_rollouts.jsonl").read_text().splitlines():
                one = json.loads(line)
                wanted[step, str(one["example_id"])] = [step, "t", str(one["example_id"]), one["prompt"] + one["completion"], "[]", one["reward"]]
        rows = {row["step"]: row for row in server.history((run.folder / "trackers/wandb_id").read_text()) if "samples" in row}
        self.assertEqual(sorted(rows), list(range(10, STEPS + 1, 10)), said)
        for step, row in rows.items():
            table = json.loads(server.files[row["samples"]["path"]])
            self.assertEqual((table["columns"], len(table["data"]), {cells[0] for cells in table["data"]}), (columns, 8, {step}))
            for cells in table["data"]:
                self.assertEqual([*cells[:3], json.loads(cells[3]), *cells[4:]], wanted[step, cells[2]])
            self.assertEqual(sum(row["distributions/reward"]["values"]), 10, "a histogram of the ten rewards")
            self.assertGreater(server.artifact_tables(row["samples"]["path"]), 0, f"no artifact has the table of step {step}")
        self.assertTrue(any("media/table/final-samples" in name for name in server.files), list(server.files))

    def test_wandb_online(self):
        """The client talks to a server while it is killed."""
        settings = {"wandb": {"project": "p", "log_extras": {"samples": True, "distributions": True, "interval": 10}}}
        with WandbStandIn() as server:
            run = self.run_with_kills("wandb", KILLS or 1, settings, self.python, pause=(2.0, 6.0), env={"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a", "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.5"})
            said = (run.folder / "logs/tracker_wandb.log").read_text()[-3000:]
            run_id = (run.folder / "trackers/wandb_id").read_text()
            self.assertEqual(server.problems, [], said)
            rows = [row for row in server.history(run_id) if "prl/role" in row]
            self.assertEqual(sorted([row["step"], row["prl/role"]] for row in rows), [[step, role] for step in range(1, STEPS + 1) for role in ("orchestrator", "trainer")], said)
            self.assertEqual({row["step"]: row["loss/mean"] for row in rows if "loss/mean" in row}, {step: step / 8 for step in range(1, STEPS + 1)})
            self.assertEqual(len({row["_step"] for row in rows}), len(rows), "steps of the client are used twice")
            self.assertEqual(server.complete, {run_id: 0})
            self.check_samples(run, server, said)
            self.assertEqual([(view["entityName"], view["projectName"], view["displayName"]) for view in server.views], [("e", "p", "overview")], said)
            panels = [panel["config"] for section in server.views[0]["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]
            self.assertEqual({panel["xAxis"] for panel in panels}, {"step"})
            self.assertLessEqual({"reward/all/mean", "loss/mean", "entropy/all/mean"}, {key for panel in panels for key in panel["metrics"]})
            # Another run of the project makes no second one.
            other = Run("wandb", wandb={"project": "p"})
            self.addCleanup(other.close)
            other.python, other.env = self.python, run.env
            other.write(1)
            other.start()
            self.assertEqual(other.finish()[0], 0)
            self.assertEqual(len(server.views), 1)

    def test_wandb_shared(self):
        """A writer for each role, which are killed with the tracker: each row comes once, by a writer of its role; the run ends with the orchestrator's."""
        settings = {"wandb": {"project": "p", "log_extras": {"samples": True, "distributions": True, "interval": 10}}}
        with WandbStandIn() as server:
            env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a", "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.5", "WANDB_SHARED_MODE": "1", "PRL_RUN_ID": "made-by-the-launcher"}
            run = self.run_with_kills("wandb", KILLS or 1, settings, self.python, pause=(4.0, 8.0), env=env)
            said = (run.folder / "logs/tracker_wandb.log").read_text()[-3000:]
            run_id = "made-by-the-launcher"
            self.assertEqual((run.folder / "trackers/wandb_id").read_text(), run_id)
            self.assertEqual(server.problems, [], said)
            rows = server.history(run_id)
            self.assertEqual(sorted([row["step"], row["prl/role"]] for row in rows if "prl/role" in row), [[step, role] for step in range(1, STEPS + 1) for role in ("orchestrator", "trainer")], said)
            self.assertEqual({row["step"]: row["loss/mean"] for row in rows if "loss/mean" in row}, {step: step / 8 for step in range(1, STEPS + 1)})
            roles = [{rows[number].get("prl/role", "orchestrator") for number in numbers.values()} for numbers in server.writers[run_id].values() if numbers]
            self.assertTrue(all(len(one) == 1 for one in roles), roles)
            self.assertEqual(set.union(*roles), {"orchestrator", "trainer"})
            self.assertEqual(server.complete, {run_id: 0})
            self.check_samples(run, server, said)
            summary = json.loads((run.folder / "final_summary.json").read_text())
            self.assertEqual((summary["loss/mean"], summary["reward/all/mean"]), (STEPS / 8, STEPS / 8))

    def test_wandb_waits_for_a_server_that_does_not_say_what_it_has(self):
        with WandbStandIn() as server:
            run = Run("wandb", wandb={"project": "p"})
            self.addCleanup(run.close)
            run.python, run.env = self.python, {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a"}
            for step in (1, 2):
                run.write(step)
                server.num_failures = 2  # of the first start none: the server has no rows yet
                run.start()
                status, out = run.finish()
                self.assertEqual(status, 0, out)
            self.assertIn("the database does not answer", out)
            rows = [(row["step"], row["prl/role"]) for row in server.history((run.folder / "trackers/wandb_id").read_text()) if "prl/role" in row]
            self.assertEqual(sorted(rows), [(step, role) for step in (1, 2) for role in ("orchestrator", "trainer")])

    def test_mlflow(self):
        run = self.run_with_kills("mlflow", KILLS or 1, {"mlflow": {"experiment": "e"}}, self.python, pause=(3.0, 8.0))
        read = """
import json, sys, mlflow
c = mlflow.MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
runs = c.search_runs([c.get_experiment_by_name("e").experiment_id])
print(json.dumps([[r.info.status for r in runs], [[m.step, m.value] for m in c.get_metric_history(runs[0].info.run_id, "loss/mean")]]))"""
        statuses, points = read_by(self.python, read, run.folder)
        self.assertEqual(statuses, ["FINISHED"])
        self.assertEqual(sorted(points), [[step, step / 8] for step in range(1, STEPS + 1)])


    def test_trackio(self):
        run = self.run_with_kills("trackio", KILLS or 1, {"trackio": {"project": "p", "name": "n"}}, self.python, pause=(3.0, 8.0))
        read = """
import json, os, sys
os.environ["TRACKIO_DIR"] = sys.argv[1] + "/trackio"
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([[row["step"], row["prl/role"], row.get("loss/mean")] for row in SQLiteStorage.get_logs("p", "n")]))"""
        rows = read_by(self.python, read, run.folder)
        self.assertEqual(sorted(row[:2] for row in rows), [[step, role] for step in range(1, STEPS + 1) for role in ("orchestrator", "trainer")])
        self.assertEqual([row[2] for row in sorted(rows, key=str) if row[1] == "trainer"].count(None), 0)

    def test_a_run_that_failed_is_shown_as_failed(self):
        for kind, settings, read, wanted in (
                ("mlflow", {"mlflow": {"experiment": "e"}}, """
import json, sys, mlflow
c = mlflow.MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
print(json.dumps([r.info.status for r in c.search_runs([c.get_experiment_by_name("e").experiment_id])]))""", ["FAILED"]),
                ("wandb", {"wandb": {"project": "p", "offline": True}}, """
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
from prl_tracker import wandb_run
print(json.dumps([r.exit.exit_code for path in pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb") for r in wandb_run.offline_records(path) if r.WhichOneof("record_type") == "exit"]))""", [1])):
            run = Run(kind, **settings)
            self.addCleanup(run.close)
            run.python = self.python
            run.write(1)
            run.start()
            status, out = run.finish(b"f")
            self.assertEqual(status, 0, out)
            self.assertEqual(read_by(self.python, read, run.folder, HERE.parent), wanted, kind)

    def test_mlflow_killed_while_it_makes_its_database(self):
        run = Run("mlflow", mlflow={"experiment": "e"})
        self.addCleanup(run.close)
        run.python = self.python
        run.write(1)
        run.start()
        until = time.monotonic() + PATIENCE_S
        # The tables are made one after the other: with 40 pages some are there and others are not.
        while not any(size_of(path) >= 40 * 4096 for path in run.folder.iterdir() if "mlflow.db" in path.name):
            self.assertLess(time.monotonic(), until, "no database is being made")
            time.sleep(0.005)
        run.kill()
        run.start()
        status, out = run.finish()
        self.assertEqual(status, 0, out + (run.folder / "logs/tracker_mlflow.log").read_text()[-2000:])
        self.assertEqual([path.name for path in run.folder.iterdir() if "mlflow.db" in path.name], ["mlflow.db"])


class PrimeTest(TrackerTest):
    def platform(self, answer):
        """A server of the platform: answer(request, body) gives status and JSON."""
        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self):
                status, value = answer(self, self.rfile.read(int(self.headers["Content-Length"])))
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_PUT = reply

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server

    def test_the_calls_of_the_platform(self):
        calls = []

        def answer(request, body):
            calls.append((request.command, request.path, request.headers["Authorization"], json.loads(body)))
            is_first_metrics = request.path == "/rft/metrics" and sum(call[1] == request.path for call in calls) == 1
            return 503 if is_first_metrics else 200, {"data": {"run_id": "r1"}} if request.path == "/rft/external-runs" else {}

        server = self.platform(answer)
        os.environ["PRL_TEST_KEY"] = "secret"
        run = Run("prime", prime={"base_url": f"http://127.0.0.1:{server.server_port}/rft", "api_key_var": "PRL_TEST_KEY", "run_name": "n", "log_extras": {"samples": False}})
        self.addCleanup(run.close)
        run.write(1)
        run.start()
        status, out = run.finish()
        self.assertEqual(status, 0, out)
        self.assertIn("503", out)  # said once, and tried again
        self.assertEqual({call[2] for call in calls}, {"Bearer secret"})
        self.assertEqual([call[:2] for call in calls], [("POST", "/rft/external-runs"), *[("POST", "/rft/metrics")] * 3, ("POST", "/rft/finalize"), ("PUT", "/rft/external-runs/r1/status")])
        self.assertEqual(calls[0][3]["name"], "n")
        self.assertEqual(calls[2][3], {"run_id": "r1", "step": 1, "metrics": {"reward/all/mean": 0.125, "orchestrator/time/step": 0.5, "step": 1}})
        self.assertEqual(calls[-1][3], {"status": "completed"})

    def test_samples_are_sent_as_parquet(self):
        python = venvs.ready("legacy")  # has pyarrow
        if not python:
            self.skipTest("the environment `legacy` is not there (python/tests/venvs.py)")
        calls = []

        def answer(request, body):
            calls.append((request.command, request.path, body))
            where = {"presigned_url": f"http://127.0.0.1:{server.server_port}/bucket?signature=s", "s3_key": "k"}
            return 200, {"data": {"run_id": "r1"} if request.path == "/rft/external-runs" else where if request.path == "/rft/samples/presign" else {}}

        server = self.platform(answer)
        run = Run("prime", prime={"base_url": f"http://127.0.0.1:{server.server_port}/rft", "api_key_var": "PRL_TEST_KEY", "log_extras": {"samples": True, "interval": 10}})
        self.addCleanup(run.close)
        run.python, run.env = python, {"PRL_TEST_KEY": "secret"}
        for step in (9, 10):
            run.write(step)
        run.write_rollouts(10)
        run.start()
        status, out = run.finish()
        self.assertEqual(status, 0, out)
        self.assertEqual([call[:2] for call in calls if "samples" in call[1] or "bucket" in call[1]], [("POST", "/rft/samples/presign"), ("PUT", "/bucket?signature=s"), ("POST", "/rft/samples/confirm")])
        self.assertEqual(json.loads(next(body for _, path, body in calls if path.endswith("/confirm"))), {"run_id": "r1", "step": 10, "s3_key": "k"})
        (run.folder / "sent.parquet").write_bytes(next(body for command, path, body in calls if path.startswith("/bucket")))
        rows = read_by(python, "import json, sys, pyarrow.parquet\nprint(json.dumps(pyarrow.parquet.read_table(sys.argv[1]).to_pylist()))", run.folder / "sent.parquet")
        self.assertEqual((len(rows), {row["step"] for row in rows}), (8, {10}))
        for row in rows:
            self.assertEqual((json.loads(row["messages"])[1]["content"], row["reward"]), (f"answer 10.{row['example_id']}", int(row["example_id"]) / 8))

    def test_without_a_key_nothing_is_sent_and_that_is_said(self):
        os.environ.pop("PRL_TEST_KEY", None)
        run = Run("prime", prime={"base_url": "http://127.0.0.1:1", "api_key_var": "PRL_TEST_KEY", "log_extras": {"samples": False}})
        self.addCleanup(run.close)
        run.start()
        out, _ = run.process.communicate(timeout=PATIENCE_S)
        run.control.close()
        self.assertEqual(run.process.returncode, 3)
        self.assertIn("WARNING prime: the variable PRL_TEST_KEY", out)


class FollowTest(unittest.TestCase):
    def test_lines_that_are_no_rows_hide_no_others(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "metrics.jsonl"
            reader = follow.Follower(path)
            self.assertEqual(reader.read(), [])
            path.write_bytes(b'{"step": 1, "role": "a", "time": 2.5, "x": 3}\nnothing\n[1]\n{"step": "s"}\n\xff\n{"step": 2, "time": 1}\n{"step": 3, "ti')
            self.assertEqual([(row.step, row.role, row.time, row.metrics) for row in reader.read()], [(1, "a", 2.5, {"x": 3.0}), (2, "", 1.0, {})])
            with open(path, "a") as out:
                out.write('me": 9}\n')
            self.assertEqual([row.identity for row in reader.read()], [("", 3, 9.0)])
            other = path.with_suffix(".new")
            other.write_text('{"step": 7, "time": 0}\n')
            os.replace(other, path)
            self.assertEqual(reader.read(), [])
            self.assertEqual([row.step for row in reader.read()], [7])

    def test_names_differ_between_roles(self):
        row = follow.Row({"step": 1, "role": "orchestrator", "time": 0, "time/step": 1, "reward/all/mean": 2})
        self.assertEqual(follow.flat_metrics(row), {"orchestrator/time/step": 1.0, "reward/all/mean": 2.0})
        row = follow.Row({"step": 1, "role": "trainer", "time": 0, "time/step": 1})
        self.assertEqual(follow.flat_metrics(row), {"time/step": 1.0})


if __name__ == "__main__":
    unittest.main()
