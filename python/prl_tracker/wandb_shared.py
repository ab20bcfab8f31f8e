"""One wandb run with a writer for each role, by wandb's shared mode: a process per role, as each has a client of its own.

`python -m prl_tracker.wandb_shared` is a writer: the first line that it reads says how it begins the run, each other line is a row, or the end; it answers
each with a line. A writer whose input ends leaves at once, as if it were killed with the tracker.
"""
import json
import os
import subprocess
import sys

PATIENCE_S = 120
LABELS = {"sft": "trainer", "": "trainer"}


def is_wanted():
    return os.environ.get("WANDB_SHARED_MODE", "").lower() in ("1", "true")


def label_of(role):
    return LABELS.get(role, role)


class Writers:
    """The processes, by label. One that ends ends the tracker too: nobody knows what it has handed over but the server, which the tracker asks when
    it is started again."""

    def __init__(self, begin, primary):
        self.begin, self.primary, self.processes = begin, primary, {}

    def start(self, label):
        # wandb hands its own service to child processes, and a service has one writer per run.
        env = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
        process = subprocess.Popen([sys.executable, "-m", "prl_tracker.wandb_shared"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        try:
            answer = self._ask(process, {**self.begin, "label": label, "is_primary": label == self.primary})
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.processes[label] = process
        return answer

    def send(self, label, row):
        if label not in self.processes:
            self.start(label)
        self._ask(self.processes[label], row)

    def finish(self, exit_code):
        """The summaries of all, and the run's address. The primary writer, which says how the run ended, is the last."""
        summary, url = {}, ""
        for label in sorted(self.processes, key=lambda one: one == self.primary):
            process = self.processes[label]
            answer = self._ask(process, {"exit_code": exit_code})
            summary.update(answer["summary"])
            url = answer["url"] or url
            process.stdin.close()
            process.wait(PATIENCE_S)
        self.processes = {}
        return summary, url

    @staticmethod
    def _ask(process, message):
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"wandb: a writer ended with status {process.wait(PATIENCE_S)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def _write():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print
    import wandb

    from prl_tracker import wandb_run
    run = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if run is None:
                settings = wandb.Settings(**wandb_run.QUIET, x_label=message["label"], x_primary=message["is_primary"], x_update_finish_state=message["is_primary"])
                run = wandb.init(**message["run"], config=message["config"] if message["is_primary"] else None, mode="shared", settings=settings)
                run.define_metric("*", step_metric="step")
                answer = {"entity": run.entity}
            elif "exit_code" in message:
                answer = {"summary": wandb_run.summary_of(run), "url": run.url or ""}
                run.finish(exit_code=message["exit_code"])
            else:
                wandb_run.log(run, **message)
                answer = {}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        if "summary" in answer:
            return
    os._exit(1)


if __name__ == "__main__":
    _write()
