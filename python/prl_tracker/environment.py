"""The package of a tracker: the interpreter's own if it has it, else in a virtual environment that is made once."""
import fcntl
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

EXIT_UNAVAILABLE = 3  # starting again would not help
INSTALL_SECONDS = 900
# Kind -> what must be importable, and what is installed for it. mlflow-skinny is MLflow without its server and its models.
PACKAGES = {
    "tensorboard": ([], []),
    "wandb": (["wandb"], ["wandb>=0.20,<1", "wandb-workspaces>=0.3,<1"]),
    "mlflow": (["mlflow", "sqlalchemy", "alembic"], ["mlflow-skinny>=3,<4", "sqlalchemy>=2,<3", "alembic>=1,<2"]),
    "trackio": (["trackio"], ["trackio>=0.20,<1"]),
    "prime": (["pyarrow"], ["pyarrow>=15"]),
}


class Unavailable(Exception):
    """The tracker cannot run on this machine as it is; the text says why and what to do."""


def folder():
    """Where environments are: $PRL_TRACKERS, else below $XDG_DATA_HOME or ~/.local/share."""
    chosen = os.environ.get("PRL_TRACKERS")
    if chosen:
        return pathlib.Path(chosen)
    data = os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share"
    return pathlib.Path(data) / "prl" / "trackers"


def _run(command, what):
    try:
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS,
                              env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"})
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} took more than {INSTALL_SECONDS} s")
    print(done.stdout, flush=True)
    if done.returncode != 0:
        last = ([line for line in done.stdout.splitlines() if line.strip()] or ["no output"])[-1]
        raise Unavailable(f"{what} failed: {last[:300]}")


def _install(venv, requirements):
    uv = shutil.which("uv")
    if uv:
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv], "uv venv")
        _run([uv, "pip", "install", "--quiet", "--python", venv / "bin/python", *requirements], "uv pip install")
    else:
        _run([sys.executable, "-m", "venv", "--clear", venv], f"{sys.executable} -m venv (Debian: install python3-venv, or uv)")
        _run([venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--timeout", "20", "--retries", "2", *requirements],
             "pip install")


def _packages(kind, settings):
    if kind == "prime" and not settings["prime"].get("log_extras", {}).get("samples"):
        return [], []  # parquet files of samples are all that it needs a package for
    return PACKAGES[kind]


def enter(kind, settings, messages, say):
    """Returns in an interpreter that has the packages: this one, or by starting the program again in the environment made for them.
    Raises Unavailable."""
    modules, requirements = _packages(kind, settings)
    if all(importlib.util.find_spec(module) for module in modules):
        return
    if os.environ.get("PRL_TRACKER_MESSAGES"):
        raise Unavailable(f"the environment in {sys.prefix} lacks one of {', '.join(modules)}; remove the folder, and it is made again")
    venv = folder() / kind
    stamp = venv / ".requirements"
    wanted = "\n".join(requirements)
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        with open(venv.parent / f"{kind}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists() or stamp.read_text() != wanted:
                say("INFO", f"{kind}: installing {' '.join(requirements)} into {venv}; the run goes on meanwhile")
                _install(venv, requirements)
                stamp.write_text(wanted)
    except OSError as error:
        raise Unavailable(f"the environment {venv} cannot be made: {error}")
    os.set_inheritable(messages.fileno(), True)
    os.environ["PRL_TRACKER_MESSAGES"] = str(messages.fileno())
    os.execv(venv / "bin/python", [str(venv / "bin/python"), "-m", "prl_tracker", *sys.argv[1:]])
