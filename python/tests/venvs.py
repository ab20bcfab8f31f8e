"""Virtual environments with the real packages, made from PyPI by the lock files in python/locks, kept between runs.

    python/tests/venvs.py [legacy|v1|trackers]...     makes those that are missing and prints their interpreters; says in one line each what
                                             could not be installed, and exits 0

They lie in $PRL_TEST_VENVS or ~/.cache/prl/test-venvs, named by the lock's hash. `uv` is used where it is on PATH, else venv and pip.
"""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

LOCKS = pathlib.Path(__file__).resolve().parents[1] / "locks"
KINDS = ("legacy", "v1", "trackers")
INSTALL_SECONDS = 540


class CannotInstall(Exception):
    pass


def _folder(kind):
    root = pathlib.Path(os.environ.get("PRL_TEST_VENVS") or pathlib.Path.home() / ".cache/prl/test-venvs")
    key = hashlib.sha256((LOCKS / f"{kind}.txt").read_bytes() + sys.version.encode()).hexdigest()[:12]
    return root / f"{kind}-{key}"


def ready(kind):
    """The interpreter if the environment was made, else None."""
    folder = _folder(kind)
    return str(folder / "bin/python") if (folder / ".complete").exists() else None


def _run(command, what, env=None):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS, env=env)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CannotInstall(f"{what}: {error}"[:300]) from None
    if done.returncode != 0:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["no output"]
        raise CannotInstall(f"{what} failed: {last[0][:300]}")


def make(kind):
    """Makes or reuses the environment; its interpreter. Raises CannotInstall. Two callers at once wait for each other."""
    folder = _folder(kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready(kind) is None:
            shutil.rmtree(folder, ignore_errors=True)
            _build(kind, folder)
            (folder / ".complete").touch()
    return ready(kind)


def _build(kind, folder):
    python, lock = str(folder / "bin/python"), str(LOCKS / f"{kind}.txt")
    uv = shutil.which("uv")
    if uv:
        env = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "30"}
        _run([uv, "venv", "-q", "-p", sys.executable, str(folder)], "uv venv", env)
        _run([uv, "pip", "sync", "-q", "--require-hashes", "--compile-bytecode", "-p", python, lock], f"uv pip sync {kind}.txt", env)
        return
    _run([sys.executable, "-m", "venv", str(folder)], "python3 -m venv")
    # Without an index to ask, two short tries are enough to find out.
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--timeout", "15", "--retries", "1"]
    _run([*pip, "--require-hashes", "--no-deps", "-r", lock], f"pip install -r {kind}.txt")


def main():
    for kind in sys.argv[1:] or KINDS:
        try:
            print(make(kind), flush=True)
        except CannotInstall as error:
            print(f"venvs: no environment {kind}: {error}", flush=True)


if __name__ == "__main__":
    main()
