#!/usr/bin/env python3
"""prl env install, list, show, update, remove and init, without a network: wheels made here, a folder, a git checkout, the hub's client."""
import base64
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import harness
from harness import Skip, check

sys.path.insert(0, str(harness.ROOT / "python/tests"))
import venvs

# A build backend without requirements, so that folders and checkouts install where no index answers.
BACKEND = '''
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{file}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("{module}.py", open("{module}.py").read())
        wheel.writestr("{file}-{version}.dist-info/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr("{file}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: prl\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("{file}-{version}.dist-info/RECORD", "")
    return name
'''
MODULE = "def load_environment(**kwargs):\n    raise RuntimeError('version {version}')\n"


def write_wheel(folder, name, version, files, requires=()):
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires),
             f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: prl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text.encode())}\n"
                     for path, text in files.items())
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name_in, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            wheel.writestr(name_in, text)
    return path


def write_project(folder, name, version):
    module = name.replace("-", "_")
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (folder / "backend.py").write_text(BACKEND.replace("{file}", module).replace("{module}", module).replace("{name}", name).replace("{version}", version))
    (folder / f"{module}.py").write_text(MODULE.format(version=version))
    return folder


class Installed:
    """prl env with a folder of its own for what it installs."""

    def __init__(self, root):
        self.root = root / "environments"
        self.wheels = root / "wheels"
        self.wheels.mkdir()

    def __call__(self, action, *arguments, expect=0, path=None):
        env = {"PRL_ENVIRONMENTS": str(self.root), "PIP_NO_INPUT": "1", **({"PATH": path} if path else {})}
        return harness.prl("env", action, *map(str, arguments), expect=expect, env=env)

    def install(self, target, *arguments, **options):
        return self("install", target, "--index", self.wheels, "--offline", *arguments, **options)


def test_wheels_folders_checkouts_and_versions():
    with harness.workspace("env-install") as folder:
        prl_env = Installed(folder)
        stub = write_wheel(prl_env.wheels, "verifiers", "0.3.1", {"verifiers/__init__.py": ""})
        for version in ("1.0", "1.1"):
            write_wheel(prl_env.wheels, "some-env", version, {"some_env.py": MODULE.format(version=version)}, requires=["verifiers<=0.3.1"])
        said, _ = prl_env("list")
        check("no Python environment" in said, said)

        prl_env.install("some-env==1.0")
        said, _ = prl_env("show", "some-env")
        check(all(part in said for part in ("version    1.0", "api        legacy", "verifiers  0.3.1", "module     some_env")), said)
        lock = (prl_env.root / "some-env/requirements.lock").read_text()
        digest = hashlib.sha256(stub.read_bytes()).hexdigest()
        check("some-env==1.0" in lock.replace("_", "-") and "verifiers==0.3.1" in lock and f"sha256:{digest}" in lock, lock)
        _, said = prl_env.install("some-env", expect=1)
        check("--overwrite replaces it" in said, said)

        project = write_project(folder / "my-env", "my-env", "0.1")
        prl_env.install(project)
        write_project(project, "my-env", "0.2")
        said, _ = prl_env("update", "--index", prl_env.wheels, "--offline")
        check("my-env: 0.2, before 0.1" in said and "some-env: 1.1, before 1.0" in said, f"all of them: {said}")
        prl_env("update", "some-env==9.9", "--index", prl_env.wheels, "--offline", expect=1)
        check("version    1.1" in prl_env("show", "some-env")[0], "an update that fails leaves the old one")
        _, said = prl_env("update", "other-env", expect=1)
        check("is not installed" in said, said)

        git = shutil.which("git")
        if git:
            checkout = write_project(folder / "git-env", "git-env", "0.3")
            for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "first"]):
                subprocess.run([git, "-C", checkout, *command], check=True)
            prl_env.install(f"git+file://{checkout}")
            check("version    0.3" in prl_env("show", "git-env")[0], "a checkout")

        said, _ = prl_env("list")
        check([line.split()[0] for line in said.splitlines()] == sorted(["some-env", "my-env"] + ["git-env"] * bool(git)), said)
        prl_env("remove", "my-env")
        check("my-env" not in prl_env("list")[0] and not (prl_env.root / "my-env").exists(), "removed")
        _, said = prl_env("remove", "my-env", expect=1)
        check("is not installed" in said, said)


def test_the_hub_is_reached_through_its_client():
    with harness.workspace("env-hub") as folder:
        prl_env = Installed(folder)
        path = os.environ["PATH"]
        bare = os.pathsep.join(part for part in path.split(os.pathsep) if not (pathlib.Path(part) / "prime").exists())
        _, said = prl_env.install("org/hub-env", expect=1, path=bare)
        check("its client `prime`" in said and said.count("ERROR") == 1, said)

        write_project(folder / "hub", "hub-env", "0.7")
        tools = folder / "bin"
        tools.mkdir()
        (tools / "prime").write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n[ "$1 $2 $4" = "env pull --target" ] && cp -r {folder}/hub "$5"\n')
        (tools / "prime").chmod(0o755)
        prl_env.install("org/hub-env@0.7", path=f"{tools}{os.pathsep}{bare}")
        check((folder / "asked").read_text().startswith("env pull org/hub-env@0.7 --target"), (folder / "asked").read_text())
        said, _ = prl_env("show", "hub-env")
        check(said.startswith("org/hub-env\n") and "version    0.7" in said, said)


def test_what_init_writes_runs_at_once():
    with harness.workspace("env-init") as folder:
        prl_env = Installed(folder)
        model = harness.tiny_model(folder / "model")

        def evaluate(name, *where):
            harness.prl("eval", *where, "--model.name", model, "--num-examples", 2, "--sampling.max-completion-tokens", 8, "--save.disk.path", folder / name,
                        "--output-dir", folder / "out", env={"PRL_ENVIRONMENTS": str(prl_env.root)})
            rows = [json.loads(line) for path in (folder / name).rglob("results.jsonl") for line in path.read_text().splitlines()]
            check(len(rows) == 2 and not any(row["error"] for row in rows), f"{rows}")

        prl_env("init", folder / "sums", "--api", "native")
        evaluate("native", "@", folder / "sums/eval.toml")

        python = venvs.ready("legacy")
        # What builds the template's wheel; Debian's own build of it serves Debian's Python alone.
        fetched = python and subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", prl_env.wheels, "setuptools>=70.1"],
                                            capture_output=True, timeout=60, check=False)
        if python is None or fetched.returncode != 0:
            raise Skip("the legacy template needs the library (python3 python/tests/venvs.py legacy) and setuptools from a package index")
        packages = next(pathlib.Path(python).parents[1].glob("lib/python3*/site-packages"))
        # The library as it is in the tests' environment, under the name and version that the new one asks for.
        write_wheel(prl_env.wheels, "verifiers", "0.3.1", {"verifiers_of_tests.pth": str(packages) + "\n"})
        prl_env("init", folder / "backwards")
        prl_env.install(folder / "backwards", "--python", python)
        evaluate("legacy", "--env.id", "backwards")


if __name__ == "__main__":
    harness.main(test_wheels_folders_checkouts_and_versions, test_the_hub_is_reached_through_its_client, test_what_init_writes_runs_at_once)
