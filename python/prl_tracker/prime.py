"""The platform's monitor: a run is registered, rows of metrics and parquet files of rollouts are sent, and the end is told."""
import io
import json
import os
import pathlib
import urllib.error
import urllib.request

from prl_tracker import environment, follow, samples

TIMEOUT_S = 30


class Prime:
    name = "prime"

    def __init__(self, settings):
        self.settings, self.own = settings, settings["prime"]
        self.folder = pathlib.Path(settings["run_folder"])
        self.key = os.environ.get(self.own["api_key_var"], "")
        if not self.key:
            raise environment.Unavailable(f"the variable {self.own['api_key_var']} (prime_monitor.api_key_var) holds no key; nothing is sent")
        self.extras = self.own.get("log_extras") or {}
        self.run_file = samples.state_folder(settings) / "prime_run"
        self.sent_file = samples.state_folder(settings) / "prime_sent.jsonl"  # a line per row that the platform has taken
        self.run_id = None

    def _call(self, method, path, body):
        request = urllib.request.Request(self.own["base_url"].rstrip("/") + path, json.dumps(body).encode(), method=method,
                                         headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            text = reply.read()
        return json.loads(text) if text.strip() else {}

    def open(self):
        self.run_file.parent.mkdir(parents=True, exist_ok=True)
        if self.run_file.exists():
            self.run_id = self.run_file.read_text().strip()
        else:
            reply = self._call("POST", "/external-runs", {"name": self.own.get("run_name") or self.settings["name"],
                                                          "config": dict(samples.flat_config(self.folder, self.settings, 5000))})
            reply = reply.get("data", reply)
            self.run_id = reply.get("run_id") or reply.get("id") or reply.get("runId")
            if not self.run_id:
                raise RuntimeError(f"POST /external-runs answered without the id of a run: {json.dumps(reply)[:200]}")
            temporary = self.run_file.with_suffix(".new")
            temporary.write_text(self.run_id)
            os.replace(temporary, self.run_file)
        # The platform cannot be asked what it has: a request that was under way when this process was killed may be sent twice.
        delivered = set()
        if self.sent_file.exists():
            for line in self.sent_file.read_text().split("\n")[:-1]:
                try:
                    delivered.add(follow.identity(*json.loads(line)))
                except (ValueError, TypeError):
                    continue  # half a line that a kill left, and the next one
        return delivered

    def send(self, row):
        self._call("POST", "/metrics", {"run_id": self.run_id, "step": row.step, "metrics": {**follow.flat_metrics(row), "step": row.step}})
        if row.role == "orchestrator" and row.step % self.extras.get("interval", 10) == 0 and self.extras.get("samples", True):
            self._send_samples(row.step)
        with open(self.sent_file, "a") as out:
            out.write(json.dumps(row.identity) + "\n")

    def _send_samples(self, step):
        rows = samples.table(self.folder, step, self.extras.get("sample_ratio"))
        if not rows:
            return
        import pyarrow
        import pyarrow.parquet
        columns = dict(zip(samples.COLUMNS, map(list, zip(*rows))))
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), out)
        where = self._call("POST", "/samples/presign", {"run_id": self.run_id, "step": step})
        where = where.get("data", where)
        url = where.get("presigned_url") or where.get("url")
        put = urllib.request.Request(url, out.getvalue(), method="PUT", headers={"Content-Type": "application/octet-stream"})
        with urllib.request.urlopen(put, timeout=TIMEOUT_S):
            pass
        self._call("POST", "/samples/confirm", {"run_id": self.run_id, "step": step, "s3_key": where.get("s3_key")})

    def finish(self):
        self._call("POST", "/finalize", {"run_id": self.run_id, "summary": {}})
        self._call("PUT", f"/external-runs/{self.run_id}/status", {"status": "failed" if self.settings["has_failed"] else "completed"})
        return f"run {self.run_id}"
