"""The loop: rows of metrics.jsonl, each to the destination once, whatever process is killed when.

The file is the spool: `prl` writes it whether a tracker is there or not. What a destination holds is read from the destination itself when
it is opened, so that no record of what was sent can differ from what has arrived.
"""
import json
import os
import select
import time
import traceback

from prl_tracker import environment

MAX_LINE_BYTES = 4 << 20
MAX_PART_BYTES = 8 << 20
LONGEST_PAUSE_S = 60.0


class Row:
    """One line: `step`, `role`, `time` (seconds) and `metrics`."""

    def __init__(self, fields):
        self.step = int(fields.pop("step"))
        self.role = str(fields.pop("role", ""))
        self.time = float(fields.pop("time", 0.0))
        self.metrics = {key: float(value) for key, value in fields.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}

    @property
    def identity(self):
        return identity(self.role, self.step, self.time)


def identity(role, step, when):
    """Of a row. A run that is resumed from an older step writes steps again, at another time."""
    return (role, int(step), round(when, 5))


# Keys that several roles log; in one list of curves those of the trainer keep their names.
SHARED_KEYS = {"time/step", "time/save_ckpt", "perf/throughput", "progress/total_samples", "progress/total_tokens"}


def flat_metrics(row):
    """Metrics by names that differ between roles."""
    if row.role in ("trainer", "sft", ""):
        return dict(row.metrics)
    return {f"{row.role}/{key}" if key in SHARED_KEYS else key: value for key, value in row.metrics.items()}


class Follower:
    """Whole lines of a file that grows, is replaced, or is not there yet."""

    def __init__(self, path):
        self.path = path
        self.file = None
        self.rest = b""

    def read(self):
        """New rows, at most MAX_PART_BYTES of them; lines that are no rows are left out."""
        if self.file is None:
            try:
                self.file = open(self.path, "rb")
            except FileNotFoundError:
                return []
        part = self.file.read(MAX_PART_BYTES)
        if not part:
            self._look_for_replacement()
            return []
        *lines, self.rest = (self.rest + part).split(b"\n")
        if len(self.rest) > MAX_LINE_BYTES:
            self.rest = b""
        rows = []
        for line in lines:
            try:
                rows.append(Row(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
        return rows

    def _look_for_replacement(self):
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return
        opened = os.fstat(self.file.fileno())
        if (named.st_ino, named.st_dev) != (opened.st_ino, opened.st_dev) or named.st_size < self.file.tell():
            self.file.close()
            self.file = None
            self.rest = b""


def _is_told_to_end(control, seconds, settings):
    """Waits for news on the socket; True once the run has ended, well or not. The end of `prl` itself ends this process."""
    readable, _, _ = select.select([control], [], [], seconds)
    if not readable:
        return False
    word = os.read(control, 64)
    if not word:
        raise SystemExit(0)
    settings["has_failed"] = b"f" in word
    return True


def hand_over(destination, settings, path, control, say):
    """Until the run has ended and everything is handed over. Failures of the destination are tried again, with longer and longer pauses.
    Without `control` the run has ended already."""
    delivered = _patiently(destination.open, destination.name, say)
    follower = Follower(path)
    is_ending, num_sent = control is None, 0
    while True:
        found = follower.read()
        rows = [row for row in found if row.identity not in delivered and settings.get("role", row.role) == row.role]
        for row in rows:
            _patiently(lambda row=row: destination.send(row), destination.name, say)
            delivered.add(row.identity)
            num_sent += 1
            if num_sent == 1:
                say("PROGRESS", "")  # not for the log: whoever is killed now is soon started again
        if found:
            continue
        if is_ending:
            break
        is_ending = _is_told_to_end(control, 0.5, settings)
    where = _patiently(destination.finish, destination.name, say)
    say("INFO", f"{destination.name}: {len(delivered)} rows{', ' + where if where else ''}")


def _patiently(work, name, say):
    pause = 1.0
    while True:
        try:
            return work()
        except (SystemExit, KeyboardInterrupt):
            raise
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, environment.Unavailable):
                raise
            if pause == 1.0:
                say("WARNING", f"{name}: {type(error).__name__}: {str(error)[:300]}; tried again until it works, metrics.jsonl keeps everything")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
