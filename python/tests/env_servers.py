"""An environment server of the library, in a process of its own, and what its rollouts must have in common with those of a worker."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

from peer import ROOT

ENVS = ROOT / "tests/python_envs"
START_SECONDS = 300.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_bound(address, process):
    """A busy machine takes its time to import the library; workers wait for servers less long."""
    host, port = address.removeprefix("tcp://").split(":")
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"no environment server listens at {address}, exit status {process.poll()}")
        time.sleep(0.2)


@contextlib.contextmanager
def environment_server(python, script, env_id, args=None, paths=()):
    """Its address. `script` gets the environment's id, the address and the arguments. The process group ends with the block."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "serve.py"
        path.write_text(script)
        env = {**os.environ, "PYTHONPATH": ":".join(map(str, (*paths, ENVS, ENVS / "legacy", ENVS / "v1"))), "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
        with open(os.path.join(folder, "log"), "w") as log:
            command = [python, str(path), env_id, address, json.dumps(args or {})]
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, process_group=0)
        try:
            _wait_until_bound(address, process)
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # how soon the library's server ends is not what is tested
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def told(sample):
    """What does not depend on clocks and ids."""
    keys = ("reward", "rewards", "metrics", "num_turns", "stop_condition", "is_truncated", "ok", "prompt", "completion", "tools", "answer", "info")
    return {key: _plain(sample[key]) if key in ("prompt", "completion") else sample[key] for key in keys}


def _plain(messages):
    """No content is an empty one."""
    return [{**message, "content": message["content"] or ""} for message in messages or ()]


LEGACY = """
import json, sys
from verifiers.serve import ZMQEnvServer
if __name__ == "__main__":
    ZMQEnvServer.run_server(sys.argv[1], json.loads(sys.argv[3]), address=sys.argv[2], num_workers=1, console_logging=True)
"""

V1 = """
import json, sys
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.serve.pool import serve_env
from verifiers.v1.utils import loaders
if __name__ == "__main__":
    roles = [name for name, field in loaders.env_config_type(sys.argv[1], "").model_fields.items() if isinstance(field.default, AgentConfig)]
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": sys.argv[1], **json.loads(sys.argv[3])}, "interception": {"type": "server"}, **{role: seat for role in roles}}
    serve_env(max_workers=1, address=sys.argv[2], config=loaders.resolve_env_config(config))
"""
