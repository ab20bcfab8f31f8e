"""Weights & Biases through its own client: one run, resumed by its id, offline where that is asked for or no API key is there."""
import json
import os
import pathlib
import random
import shutil
import string
import struct
import time

import wandb
from wandb.proto import wandb_internal_pb2

from prl_tracker import follow, samples

LONGEST_WAIT_FOR_WRITER_S = 30
BLOCK = 32768


def _pieces(data):
    """Whole records of a .wandb file as (their bytes, where they end), up to the first that is not: LevelDB's log format behind a header
    of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7:at + 7 + length]
        if kind not in (1, 2, 3, 4) or len(piece) < length:
            return
        parts = piece if kind in (1, 2) else parts + piece
        at += 7 + length
        if kind in (1, 4):
            yield parts, at


def offline_records(path):
    for parts, _ in _pieces(pathlib.Path(path).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(parts)
        yield record


def cut_half_record(path):
    """Of a writer that was killed: `wandb sync` refuses a file that ends within a record, and the run's files after it with it."""
    data = pathlib.Path(path).read_bytes()
    end = max((end for _, end in _pieces(data)), default=7)
    if end < len(data):
        os.truncate(path, end)


def history(path):
    """Each logged row of a .wandb file as a dictionary."""
    for record in offline_records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _is_open(path):
    """Whether a process still writes the file: wandb's own writer outlives a client that was killed."""
    wanted = os.path.realpath(path)
    for fd in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd) == wanted:
                return True
        except OSError:
            continue
    return False


class Wandb:
    name = "wandb"

    def __init__(self, settings):
        self.settings, self.own = settings, settings["wandb"]
        self.folder = pathlib.Path(settings["run_folder"])
        self.extras = self.own.get("log_extras") or {}
        self.is_offline = bool(self.own.get("offline")) or not self._has_key()
        self.next_step = 0
        self.last_samples = None

    def _has_key(self):
        if os.environ.get("WANDB_API_KEY"):
            return True
        import netrc
        try:
            return any("wandb" in host for host in netrc.netrc().hosts)
        except (OSError, netrc.NetrcParseError):
            return False

    def _run_id(self):
        """Of the configuration, else one that the folder keeps."""
        if self.own.get("id"):
            return self.own["id"]
        kept = self.folder / "trackers" / "wandb_id"
        if not kept.exists():
            made = "".join(random.choices(string.ascii_lowercase + string.digits, k=8))
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary = kept.with_suffix(".new")
            temporary.write_text(made)
            os.replace(temporary, kept)
        return kept.read_text().strip()

    def _segments(self):
        return sorted((self.folder / "wandb").glob(f"*run-*-{self.run_id}/run-{self.run_id}.wandb"))

    def _rows_that_arrived(self):
        deadline = time.monotonic() + LONGEST_WAIT_FOR_WRITER_S
        while any(map(_is_open, self._segments())) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not self.is_offline:
            path = "/".join(part for part in (self.own.get("entity"), self.own["project"], self.run_id) if part)
            try:
                run = wandb.Api().run(path)
            except (wandb.errors.CommError, ValueError) as error:
                # A server that does not answer is asked again: who takes that for an empty run sends everything twice.
                if "not find" not in str(error) and "not found" not in str(error):
                    raise
                return  # there is no such run yet
            yield from run.scan_history(keys=["step", "prl/role", "_timestamp", "_step"])
            return
        for segment in self._segments():
            if not _is_open(segment):
                cut_half_record(segment)
            rows = list(history(segment))
            if not rows:
                shutil.rmtree(segment.parent, ignore_errors=True)  # of a process that was killed before anything was written
            yield from rows

    def open(self):
        self.run_id = self._run_id()
        delivered = set()
        for row in self._rows_that_arrived():
            self.next_step = max(self.next_step, int(row.get("_step", -1)) + 1)
            if "step" in row and "prl/role" in row:
                delivered.add(follow.identity(row["prl/role"], row["step"], row["_timestamp"]))
        self.run = wandb.init(
            project=self.own["project"], entity=self.own.get("entity"), name=self.own.get("name"), group=self.own.get("group"), tags=self.own.get("tags"),
            id=self.run_id, resume="allow", mode="offline" if self.is_offline else "online", dir=str(self.folder),
            config=dict(samples.flat_config(self.folder, self.settings, 5000)),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=120))
        self.next_step = max(self.next_step, self.run.step)
        self.run.define_metric("*", step_metric="step")
        return delivered

    def send(self, row):
        data = {**follow.flat_metrics(row), "step": row.step, "prl/role": row.role, "_timestamp": row.time}
        interval = self.extras.get("interval", 10)
        if row.role == "orchestrator" and row.step % interval == 0:
            data.update(self._extras(row.step))
        if row.role == "orchestrator":
            self.last_samples = row.step
        self.run.log(data, step=self.next_step)
        self.next_step += 1

    def _extras(self, step):
        out = {}
        if self.extras.get("samples"):
            rows = samples.table(self.folder, step, self.extras.get("sample_ratio"))
            if rows:
                out["samples"] = wandb.Table(columns=samples.COLUMNS, data=rows)
        if self.extras.get("distributions"):
            for name, values in samples.distributions(self.folder, step).items():
                out[f"distributions/{name}"] = wandb.Histogram(values)
        return out

    def finish(self):
        if self.last_samples is not None and self.extras.get("samples"):
            rows = samples.table(self.folder, self.last_samples, self.extras.get("sample_ratio"))
            if rows:
                self.run.log({"final-samples": wandb.Table(columns=samples.COLUMNS, data=rows)}, step=self.next_step)
        summary = {key: value for key, value in dict(self.run.summary).items() if isinstance(value, (int, float, str))}
        (self.folder / "final_summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
        url = "" if self.is_offline else self.run.url or ""
        self.run.finish(exit_code=1 if self.settings["has_failed"] else 0)
        if not self.is_offline:
            return url
        reason = "" if self.own.get("offline") else "no WANDB_API_KEY, so offline; "
        return f"{reason}upload it with: wandb sync {self.folder}/wandb/offline-run-*-{self.run_id}"
