"""MLflow through its client. Databases take the same value once, so that what was under way when this process was killed is sent again."""
import os
import pathlib

import mlflow
from mlflow.entities import Metric, Param

from prl_tracker import follow, samples

_TAG = "prl.run"


def _marker(role):
    return f"prl/row/{role or 'run'}"


def _make_database(uri):
    """Makes the SQLite file of `uri` where there is none. The client's migrations are many transactions: one that was killed between two of them
    can never be continued. So they run on a file beside it, which takes the name when it is whole."""
    if not uri.startswith("sqlite:///"):
        return
    path = pathlib.Path(uri.removeprefix("sqlite:///"))
    for left in path.parent.glob(f".{path.name}.making-*"):
        if not pathlib.Path("/proc", left.name.rpartition("-")[2]).exists():
            left.unlink(missing_ok=True)
    if path.exists():
        return
    making = path.with_name(f".{path.name}.making-{os.getpid()}")
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments(max_results=1)
    try:
        os.link(making, path)  # another process may have been first: its file stays
    except FileExistsError:
        pass
    making.unlink()


class Mlflow:
    name = "mlflow"

    def __init__(self, settings):
        self.settings = settings
        own = settings["mlflow"]
        self.folder = pathlib.Path(settings["run_folder"])
        self.uri = own.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder.resolve()}/mlflow.db"
        _make_database(self.uri)
        self.client = mlflow.MlflowClient(tracking_uri=self.uri)
        self.experiment = own["experiment"]
        self.run_name = own.get("name") or settings["name"]
        self.run_id = None

    def open(self):
        experiment = self.client.get_experiment_by_name(self.experiment)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
        key = str(self.folder.resolve()).replace("'", "")
        # Found by its tag: a process that was killed may have made the run without having noted it anywhere.
        found = self.client.search_runs([experiment_id], f"tags.`{_TAG}` = '{key}'", order_by=["attributes.start_time DESC"], max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = self.client.create_run(experiment_id, tags={_TAG: key}, run_name=self.run_name).info.run_id
            params = samples.flat_config(self.folder, self.settings, 500)
            # Of a server's batches each holds 100 parameters.
            for at in range(0, len(params), 100):
                self.client.log_batch(self.run_id, params=[Param(k[:250], v[:500]) for k, v in params[at:at + 100]])
        delivered = set()
        for key in self.client.get_run(self.run_id).data.metrics:
            if not key.startswith("prl/row/"):
                continue
            role = key.removeprefix("prl/row/")
            for one in self.client.get_metric_history(self.run_id, key):
                delivered.add(follow.identity("" if role == "run" else role, one.step, one.value))
        return delivered

    def send(self, row):
        stamp = int(row.time * 1000)
        metrics = [Metric(key[:250], value, stamp, row.step) for key, value in follow.flat_metrics(row).items()]
        # A batch holds 1,000 at most. The marker is in the last one: a row without it is sent again.
        metrics.append(Metric(_marker(row.role), row.time, stamp, row.step))
        for at in range(0, len(metrics), 900):
            self.client.log_batch(self.run_id, metrics=metrics[at:at + 900])

    def finish(self):
        self.client.set_terminated(self.run_id, "FAILED" if self.settings["has_failed"] else "FINISHED")
        return f"run {self.run_id} in {self.uri}"
