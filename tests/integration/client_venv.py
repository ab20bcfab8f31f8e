"""Python environments of the client tests: each has its packages in a folder of its own below build/, made once."""
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make(name, requirements):
    """Makes or reuses the environment; its interpreter."""
    venv = ROOT / "build" / f"{name}-venv"
    stamp = venv / ".requirements"
    wanted = pathlib.Path(requirements).read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        if subprocess.run([sys.executable, "-m", "venv", venv], stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit("python3 -m venv does not work here; install python3-venv")
        subprocess.run([venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements], check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return str(venv / "bin/python")


def enter(name, module, script):
    """Goes on in this process if `module` can be imported; else starts the script again in the environment made from the
    requirements.txt beside it. With --skip-without-package it exits with 77 where no environment has been made."""
    if importlib.util.find_spec(module):
        return
    if os.environ.get("PRL_CLIENT_VENV") == name:
        sys.exit(f"{module} is not in the environment that was made for it")
    stamp = ROOT / "build" / f"{name}-venv/.requirements"
    if "--skip-without-package" in sys.argv and not stamp.exists():
        print(f"skipped: {module} is not here; run {pathlib.Path(script).relative_to(ROOT)} once to install it")
        sys.exit(77)
    python = make(name, pathlib.Path(script).with_name("requirements.txt"))
    os.environ["PRL_CLIENT_VENV"] = name
    os.execv(python, [python, *sys.argv])
