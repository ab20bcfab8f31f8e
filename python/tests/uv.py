"""`uv` for the environments of the tests, which it makes in seconds where pip takes minutes: the one on PATH, or one installed by python/locks/uv.txt
into a folder beside those environments."""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

LOCK = pathlib.Path(__file__).resolve().parents[1] / "locks/uv.txt"
INSTALL_SECONDS = 120
# Only this interpreter will do, and a request of the index that does not come is given up.
ENVIRONMENT = {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "30"}


def root():
    """Where the environments of the tests lie."""
    return pathlib.Path(os.environ.get("PRL_TEST_VENVS") or pathlib.Path.home() / ".cache/prl/test-venvs")


def find():
    """Its path, or None where it is not on PATH and cannot be installed. Two callers at once wait for each other."""
    if shutil.which("uv"):
        return shutil.which("uv")
    folder = root() / f"uv-{hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--timeout", "15", "--retries", "1"]
            try:
                for command in ([sys.executable, "-m", "venv", folder], [*pip, "--require-hashes", "--no-deps", "-r", LOCK]):
                    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=INSTALL_SECONDS, check=True)
            except (subprocess.SubprocessError, OSError):
                return None
            (folder / ".complete").touch()
    return str(folder / "bin/uv")
