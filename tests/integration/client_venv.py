"""Python environments of the client tests: each has its packages in a folder of its own below build/, made once.

    tests/integration/client_venv.py        makes those that are missing; says in one line each what could not be installed, and exits 0
"""
import fcntl
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/tests"))
import uv  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
CLIENTS = {"openai-client": "openai_client", "agents": "agents_client", "lm-eval": "lm_eval_client",
           "kubernetes": "kubernetes_client"}
INSTALL_SECONDS = 420


class CannotInstall(Exception):
    pass


def _stamp(name):
    return ROOT / "build" / f"{name}-venv/.requirements"


def is_ready(name, requirements):
    stamp = _stamp(name)
    return stamp.exists() and stamp.read_text() == pathlib.Path(requirements).read_text()


def _run(command, what):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_SECONDS,
                              env={**os.environ, **uv.ENVIRONMENT})
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"{what} took more than {INSTALL_SECONDS} s")
    if done.returncode != 0:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["no output"]
        raise CannotInstall(f"{what} failed: {last[0][:300]}")


def make(name, requirements):
    """Makes or reuses the environment; its interpreter. Raises CannotInstall. Two callers at once wait for each other."""
    venv = _stamp(name).parent
    venv.parent.mkdir(exist_ok=True)
    with open(venv.parent / f"{name}-venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready(name, requirements):
            what = f"install -r {pathlib.Path(requirements).relative_to(ROOT)}"
            if installer := uv.find():
                _run([installer, "venv", "--quiet", "--clear", "--python", sys.executable, venv], "uv venv")
                _run([installer, "pip", "install", "--quiet", "--python", venv / "bin/python", "-r", requirements], f"uv pip {what}")
            else:
                _run([sys.executable, "-m", "venv", venv], "python3 -m venv")
                # Without an index to ask, two short tries are enough to find out.
                _run([venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--timeout", "15", "--retries",
                      "1", "-r", requirements], f"pip {what}")
            _stamp(name).write_text(pathlib.Path(requirements).read_text())
    return str(venv / "bin/python")


def enter(name, module, script):
    """Goes on in this process if `module` can be imported; else starts the script again in the environment made from the
    requirements.txt beside it. With --skip-without-package it exits with 77 where no environment has been made."""
    if importlib.util.find_spec(module):
        return
    if os.environ.get("PRL_CLIENT_VENV") == name:
        sys.exit(f"{module} is not in the environment that was made for it")
    requirements = pathlib.Path(script).with_name("requirements.txt")
    if "--skip-without-package" in sys.argv and not is_ready(name, requirements):
        print(f"skipped: the package {module} is not installed; tests/integration/client_venv.py installs it and says why it cannot")
        sys.exit(77)
    try:
        python = make(name, requirements)
    except CannotInstall as error:
        sys.exit(f"{module} cannot be installed: {error}")
    os.environ["PRL_CLIENT_VENV"] = name
    os.execv(python, [python, *sys.argv])


def main():
    for name, folder in CLIENTS.items():
        requirements = HERE / folder / "requirements.txt"
        if is_ready(name, requirements):
            continue
        print(f"client tests: installing the packages of {requirements.relative_to(ROOT)}", flush=True)
        try:
            make(name, requirements)
        except CannotInstall as error:
            print(f"client tests: {folder} is skipped: {error}", flush=True)


if __name__ == "__main__":
    main()
