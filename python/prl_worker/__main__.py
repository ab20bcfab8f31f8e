"""`python -m prl_worker --fd N | --connect HOST:PORT | --listen HOST:PORT`"""

import argparse
import asyncio
import fcntl
import os
import signal
import socket
import sys

MIN_PYTHON = (3, 11)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prl_worker", description="Plays rollouts of Python environments (protocol prl-env/1).")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--fd", type=int, help="descriptor of an inherited stream socket; also PRL_ENV_FD")
    where.add_argument("--connect", metavar="HOST:PORT")
    where.add_argument("--listen", metavar="HOST:PORT")
    parser.add_argument("--template", action="store_true", help="fork workers on request over the descriptor; see template.py")
    parser.add_argument("--protocol", type=int, default=None, help=argparse.SUPPRESS)  # tests of the refusal
    parser.add_argument("--patience", type=float, default=1.0, help=argparse.SUPPRESS)  # factor of the periods of grace; tests wait for them
    arguments = parser.parse_args()
    if arguments.fd is None and arguments.connect is None and arguments.listen is None:
        fd = os.environ.pop("PRL_ENV_FD", "")
        if not fd.isdigit():
            parser.error("one of --fd, --connect, --listen or the variable PRL_ENV_FD is needed")
        arguments.fd = int(fd)
    return arguments


def _keep_output_apart(fd: int | None) -> int | None:
    """Moves the connection away from 0, 1 and 2, points stdout to stderr and stdin to nothing. Gives the connection's descriptor."""
    if fd is not None:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(fd)
        fd = moved
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    return fd


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise SystemExit(f"prl_worker: {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


async def _serve(sock: socket.socket, token: str | None, arguments: argparse.Namespace) -> None:
    from prl_worker import PROTOCOL
    from prl_worker.worker import Worker

    sock.setblocking(False)
    worker = Worker(token, PROTOCOL if arguments.protocol is None else arguments.protocol, arguments.patience)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker._on_shutdown, {"t": "shutdown"})
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's Ctrl-C is for the orchestrator
    await loop.create_connection(lambda: worker.connection, sock=sock)
    worker.watch(sock.fileno())
    await worker.done.wait()
    sys.stderr.flush()
    # Threads and exit handlers of libraries must not keep a finished worker alive.
    os._exit(0)


async def _main(arguments: argparse.Namespace, fd: int | None, token: str | None) -> None:
    if fd is not None:
        await _serve(socket.socket(fileno=fd), token, arguments)
    elif arguments.connect:
        sock = await asyncio.to_thread(socket.create_connection, _address(arguments.connect), 60.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _serve(sock, token, arguments)
    else:
        address = _address(arguments.listen)
        listener = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        host, port = listener.getsockname()[:2]
        print(f"listening on {host}:{port}", file=sys.stderr, flush=True)
        listener.setblocking(False)
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        listener.close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _serve(sock, token, arguments)


def main() -> None:
    if sys.version_info < MIN_PYTHON:
        raise SystemExit(f"prl_worker: Python {sys.version.split()[0]} ({sys.executable}) is too old, 3.11 is needed")
    if parent := os.environ.pop("PRL_PARENT_PID", ""):
        from prl_worker import process

        process.die_with(int(parent))
    arguments = _arguments()
    fd = _keep_output_apart(arguments.fd)
    token = os.environ.pop("PRL_ENV_TOKEN", None)
    # Under its own name the C library takes it away from programs whose real user id is another than the effective one.
    if folder := os.environ.pop("PRL_TMPDIR", ""):
        os.environ["TMPDIR"] = folder
    for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from prl_worker import loading

    loading.guard_signals()
    if arguments.template:
        from prl_worker.template import Template

        fd = Template(fd).serve()
    try:
        asyncio.run(_main(arguments, fd, token))
    except OSError as error:
        raise SystemExit(f"prl_worker: {error}") from None


if __name__ == "__main__":  # processes that an environment spawns import this file
    main()
