"""trackio through its own client."""
import trackio
from trackio.sqlite_storage import SQLiteStorage

from prl_tracker import follow, samples

_TIME, _ROLE = "prl/time", "prl/role"


class Trackio:
    name = "trackio"

    def __init__(self, settings):
        self.settings = settings
        self.own = settings["trackio"]
        self.run_name = self.own.get("name") or settings["name"]

    def open(self):
        delivered = set()
        if not self.own.get("space_id"):
            for row in SQLiteStorage.get_logs(self.own["project"], self.run_name) or []:
                if _TIME in row:
                    delivered.add(follow.identity(row.get(_ROLE, ""), row.get("step", 0), row[_TIME]))
        self.run = trackio.init(project=self.own["project"], name=self.run_name, space_id=self.own.get("space_id"), resume="allow", embed=False,
                                config=dict(samples.flat_config(samples.run_folder(self.settings), self.settings, 500)), auto_log_gpu=False, auto_log_cpu=False)
        return delivered

    def send(self, row):
        trackio.log({**follow.flat_metrics(row), _TIME: row.time, _ROLE: row.role}, step=row.step)

    def finish(self):
        trackio.finish()
        return f"project {self.own['project']}, run {self.run_name}"
