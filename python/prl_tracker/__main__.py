"""Entry: makes sure that the tracker's package is there, then follows the run's files until it is told that the run has ended.

With PRL_TRACKER_CONTROL that descriptor is a socket to `prl`: a byte on it says that the run has ended ("f": failed), its end that `prl` has.
Without it the run is over, and what a tracker has not taken is handed over. Lines on stdout are for the run's log ("INFO text",
"WARNING text"); what packages print goes to the file `log` of the settings.
"""
import json
import os
import pathlib
import sys

from prl_tracker import environment, follow

def open_destination(kind, settings):
    if kind == "tensorboard":
        from prl_tracker import tensorboard
        return tensorboard.TensorBoard(settings)
    if kind == "wandb":
        from prl_tracker import wandb_run
        return wandb_run.Wandb(settings)
    if kind == "mlflow":
        from prl_tracker import mlflow_run
        return mlflow_run.Mlflow(settings)
    if kind == "trackio":
        from prl_tracker import trackio_run
        return trackio_run.Trackio(settings)
    if kind == "prime":
        from prl_tracker import prime
        return prime.Prime(settings)
    raise SystemExit(f"no tracker is called {kind}")


def separate_output(log):
    """The stream of lines for the run's log; everything else that is printed goes to the file."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    return messages


def main():
    kind, path = sys.argv[1:]
    settings = json.loads(pathlib.Path(path).read_text())
    folder = pathlib.Path(settings["run_folder"])
    if os.environ.get("PRL_TRACKER_MESSAGES"):  # this program again, in the environment that it has made
        messages = os.fdopen(int(os.environ["PRL_TRACKER_MESSAGES"]), "w", buffering=1)
    else:
        messages = separate_output(folder / settings.get("log", f"logs/tracker_{kind}.log"))

    def say(level, text):
        messages.write(f"{level} {' '.join(str(text).split())}\n")

    try:
        environment.enter(kind, settings, messages, say)
        control = os.environ.get("PRL_TRACKER_CONTROL")
        settings["has_failed"] = False
        destination = open_destination(kind, settings)
        follow.hand_over(destination, settings, folder / settings["metrics"], control and int(control), say)
    except environment.Unavailable as error:
        say("WARNING", f"{kind}: {error}")
        sys.exit(environment.EXIT_UNAVAILABLE)


if __name__ == "__main__":
    main()
