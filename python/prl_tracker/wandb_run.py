"""Weights & Biases through its own client: one run, resumed by its id, offline where that is asked for or no API key is there. One writer hands over
the rows of all roles, unless WANDB_SHARED_MODE asks for one per role (wandb_shared.py)."""
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

from prl_tracker import follow, samples, wandb_shared, wandb_view

LONGEST_WAIT_FOR_WRITER_S = 30
MOST_TRIES_OF_VIEW = 5
BLOCK = 32768
QUIET = {"console": "off", "silent": True, "x_disable_stats": True, "init_timeout": 120}


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


def log(run, data, tables, histograms, **more):
    """One row, with tables of samples and histograms by name."""
    run.log({**data, **{name: wandb.Table(columns=samples.COLUMNS, data=rows) for name, rows in tables.items()}, **{name: wandb.Histogram(values) for name, values in histograms.items()}}, **more)


def summary_of(run):
    return {key: value for key, value in dict(run.summary).items() if isinstance(value, (int, float, str))}


class Wandb:
    name = "wandb"

    def __init__(self, settings):
        self.settings, self.own = settings, settings["wandb"]
        self.folder = pathlib.Path(settings["run_folder"])
        self.extras = self.own.get("log_extras") or {}
        self.is_offline = bool(self.own.get("offline")) or not self._has_key()
        self.is_shared = wandb_shared.is_wanted() and not self.is_offline
        self.next_step = 0
        self.last_samples = None
        self.writers = None

    def _has_key(self):
        if os.environ.get("WANDB_API_KEY"):
            return True
        import netrc
        try:
            return any("wandb" in host for host in netrc.netrc().hosts)
        except (OSError, netrc.NetrcParseError):
            return False

    def _run_id(self):
        """Of the configuration, else one that the folder keeps: for each role that has a run of its own, and one for those that share it."""
        if self.own.get("id"):
            return self.own["id"]
        if self.is_shared and os.environ.get("WANDB_RUN_ID"):
            return os.environ["WANDB_RUN_ID"]
        kept = (self.folder / "trackers" if self.is_shared else samples.state_folder(self.settings)) / "wandb_id"
        if not kept.exists():
            made = (self.is_shared and os.environ.get("PRL_RUN_ID")) or "".join(random.choices(string.ascii_lowercase + string.digits, k=8))
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary = kept.with_suffix(".new")
            temporary.write_text(made)
            os.replace(temporary, kept)
        return kept.read_text().strip()

    def _segments(self):
        return sorted((self.folder / "wandb").glob(f"*run-*-{self.run_id}*/run-{self.run_id}.wandb"))

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
        run = {**{key: self.own.get(key) for key in ("project", "entity", "name", "group", "tags")}, "id": self.run_id, "dir": str(self.folder)}
        config = dict(samples.flat_config(self.folder, self.settings, 5000))
        if self.is_shared:
            self._save_view(self._open_shared(run, config))
            return delivered
        self.run = wandb.init(**run, resume="allow", mode="offline" if self.is_offline else "online", config=config, settings=wandb.Settings(**QUIET))
        self.next_step = max(self.next_step, self.run.step)
        self.run.define_metric("*", step_metric="step")
        self._save_view(self.run.entity)
        return delivered

    def _save_view(self, entity):
        """Once for a run, whatever becomes of it; again where a client was killed while it was at it, so often at most."""
        tried = samples.state_folder(self.settings) / "wandb_view"
        begun = int((tried.read_text() if tried.exists() else "") or 0)
        if self.is_offline or (tried.exists() and not 0 < begun < MOST_TRIES_OF_VIEW):
            return
        tried.parent.mkdir(parents=True, exist_ok=True)
        # Never half written: an empty file says that it is over.
        temporary = tried.with_suffix(".new")
        temporary.write_text(str(begun + 1))
        os.replace(temporary, tried)
        wandb_view.save(entity, self.own["project"])
        tried.write_text("")

    def _open_shared(self, run, config):
        """The entity. The primary writer is the orchestrator's, of fine-tuning the trainer's; of a role that runs by itself WANDB_SHARED_PRIMARY may say otherwise."""
        role = self.settings.get("role")
        first = os.environ.get("WANDB_SHARED_LABEL") or wandb_shared.label_of(role) if role else "trainer" if self.settings["config"].endswith("sft.json") else "orchestrator"
        is_primary = os.environ.get("WANDB_SHARED_PRIMARY", "1" if role in (None, "orchestrator") else "0").lower() in ("1", "true")
        self.label = first if role else None  # of all rows
        self.writers = wandb_shared.Writers({"run": run, "config": config}, primary=first if is_primary else None)
        return self.writers.start(first)["entity"]

    def _log(self, role, data, tables, histograms):
        if self.is_shared:  # the server counts the steps
            self.writers.send(self.label or wandb_shared.label_of(role), {"data": data, "tables": tables, "histograms": histograms})
        else:
            log(self.run, data, tables, histograms, step=self.next_step)
            self.next_step += 1

    def send(self, row):
        data = {**follow.flat_metrics(row), "step": row.step, "prl/role": row.role, "_timestamp": row.time}
        interval = self.extras.get("interval", 10)
        tables, histograms = {}, {}
        if row.role == "orchestrator" and row.step % interval == 0:
            tables = self._tables("samples", row.step)
            if self.extras.get("distributions"):
                histograms = {f"distributions/{name}": values for name, values in samples.distributions(self.folder, row.step).items()}
        if row.role == "orchestrator":
            self.last_samples = row.step
        self._log(row.role, data, tables, histograms)

    def _tables(self, name, step):
        rows = samples.table(self.folder, step, self.extras.get("sample_ratio")) if self.extras.get("samples") else []
        return {name: rows} if rows else {}

    def finish(self):
        tables = {} if self.last_samples is None else self._tables("final-samples", self.last_samples)
        if tables:
            self._log("orchestrator", {}, tables, {})
        exit_code = 1 if self.settings["has_failed"] else 0
        if self.is_shared:
            summary, url = self.writers.finish(exit_code)
        else:
            summary, url = summary_of(self.run), "" if self.is_offline else self.run.url or ""
        state = samples.state_folder(self.settings)
        if not state.exists():
            return  # somebody has removed the run: nothing is made again in its folder
        own = state if self.settings.get("role") == "trainer" else self.folder  # beside it an orchestrator's tracker may write its own
        (own / "final_summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
        if not self.is_shared:
            self.run.finish(exit_code=exit_code)
        if not self.is_offline:
            return url
        reason = "" if self.own.get("offline") else "no WANDB_API_KEY, so offline; "
        return f"{reason}upload it with: wandb sync {self.folder}/wandb/offline-run-*-{self.run_id}"
