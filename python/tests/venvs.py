"""Virtual environments with the real packages, made from PyPI by the lock files in python/locks, kept between runs.

    python/tests/venvs.py [legacy|v1|trackers|traces|published]...     makes those that are missing and prints their interpreters; says in one line each
                                             what could not be installed, and exits 0

`published` is a folder of modules for the other two, not an environment of its own: environments that others publish, without what they depend on, and
those of the library's own tests, from its source distribution.

They lie in $PRL_TEST_VENVS or ~/.cache/prl/test-venvs, named by the lock's hash. `uv` makes them where it is there or can be had (uv.py), else venv and
pip.
"""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import uv  # noqa: E402

LOCKS = pathlib.Path(__file__).resolve().parents[1] / "locks"
KINDS = ("legacy", "v1", "trackers", "traces", "published")
INSTALL_SECONDS = 540


class CannotInstall(Exception):
    pass


def _folder(kind):
    key = hashlib.sha256((LOCKS / f"{kind}.txt").read_bytes() + sys.version.encode()).hexdigest()[:12]
    return uv.root() / f"{kind}-{key}"


def ready(kind):
    """The interpreter if the environment was made, else None; of `published`, the folder."""
    folder = _folder(kind)
    if not (folder / ".complete").exists():
        return None
    return str(folder if kind == "published" else folder / "bin/python")


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
            (_gather if kind == "published" else _build)(kind, folder)
            (folder / ".complete").touch()
    return ready(kind)


def _build(kind, folder):
    python, lock = str(folder / "bin/python"), str(LOCKS / f"{kind}.txt")
    if installer := uv.find():
        env = {**os.environ, **uv.ENVIRONMENT}
        _run([installer, "venv", "-q", "-p", sys.executable, str(folder)], "uv venv", env)
        # Compiled once: the workers of a sandbox write no bytecode, and each would compile what it imports at every start.
        _run([installer, "pip", "sync", "-q", "--require-hashes", "--compile-bytecode", "-p", python, lock], f"uv pip sync {kind}.txt", env)
        return
    _run([sys.executable, "-m", "venv", str(folder)], "python3 -m venv")
    # Without an index to ask, two short tries are enough to find out.
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--timeout", "15", "--retries", "1"]
    _run([*pip, "--require-hashes", "--no-deps", "-r", lock], f"pip install -r {kind}.txt")


def _gather(kind, folder):
    """The modules of wheels, and the environments among the tests of a source distribution."""
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--timeout", "15", "--retries", "1"]
        _run([*pip, "--require-hashes", "--no-deps", "-d", temporary, "-r", str(LOCKS / f"{kind}.txt")], f"pip download {kind}.txt")
        for path in sorted(pathlib.Path(temporary).iterdir()):
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(folder)
                continue
            with tarfile.open(path) as source:
                for member in source.getmembers():
                    if member.isfile() and "/tests/v1/fixtures/" in member.name and member.name.endswith(".py"):
                        (folder / pathlib.Path(member.name).name).write_bytes(source.extractfile(member).read())


def main():
    for kind in sys.argv[1:] or KINDS:
        try:
            print(make(kind), flush=True)
        except CannotInstall as error:
            print(f"venvs: no environment {kind}: {error}", flush=True)


if __name__ == "__main__":
    main()
