"""Chat completions over HTTP for rollouts that are played at an environment server elsewhere: each request becomes a model call of this worker.

A rollout gets an address of its own (`lease`), which nobody else can guess and which ends with it.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from prl_worker.adapters.openai_bridge import as_stream, completion_json, error_json, explain, split_body
from prl_worker.errors import ModelCallError, WorkerError
from prl_worker.model_calls import ModelCalls, Run

log = logging.getLogger("prl_worker.endpoint")

OURS = "workers of prl env-server are named host:port, without tcp://"
MAX_HEAD = 64 * 1024
HEAD_SECONDS = 30.0  # from a request's first byte to the end of its body
IDLE_SECONDS = 3600.0  # between two requests of a connection
SEND_SECONDS = 60.0  # until the other side has taken a reply
MAX_CONNECTIONS = 4096  # more are closed at once


class _BadRequest(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Lease:
    """One rollout's address, and what was asked there."""

    secret: str
    base_url: str
    run: Run | None = None
    replies: dict[str, str] = field(default_factory=dict)  # id of each completion that was given out, and its call
    calls_of: dict[str, list[str]] = field(default_factory=dict)  # by X-Session-ID, in the order of their first requests
    failure: ModelCallError | None = None  # of the last request

    def session_of(self, header: str) -> str:
        """The protocol's name: the rollout's own for the first agent that asks, numbered ones for others."""
        self.calls_of.setdefault(header, [])
        place = list(self.calls_of).index(header)
        return self.run.session_id if place == 0 else f"{self.run.session_id}/{place}"


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    session: str
    body: bytes
    goes_on: bool


def local_host_towards(address: str) -> str:
    """This machine's own address on the way to tcp://host:port. Nothing is sent."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


class ModelEndpoint:
    """Loop's thread only."""

    def __init__(self, calls: ModelCalls, max_body: int) -> None:
        self._calls = calls
        self._max_body = max_body
        self._server: asyncio.Server | None = None
        self._url = ""
        self._free: list[Lease] = []
        self._leases: dict[str, Lease] = {}
        self._connections: set[asyncio.Task] = set()

    async def open(self, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, 0, limit=MAX_HEAD)
        port = self._server.sockets[0].getsockname()[1]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("the environment server asks its model at %s", self._url)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=5)

    @contextlib.asynccontextmanager
    async def lease(self, run: Run) -> AsyncIterator[Lease]:
        """An address for one rollout. Servers keep a client for each address that they were ever given, so one is used again, unless the rollout
        ended before the server said so: requests of it may still come."""
        lease = self._free.pop() if self._free else self._new_lease()
        lease.run, lease.replies, lease.calls_of, lease.failure = run, {}, {}, None
        has_ended = False
        try:
            yield lease
            has_ended = True
        finally:
            lease.run = None
            if has_ended:
                self._free.append(lease)
            else:
                del self._leases[lease.secret]

    def _new_lease(self) -> Lease:
        secret = secrets.token_urlsafe(24)
        lease = self._leases[secret] = Lease(secret, f"{self._url}/{secret}/v1")
        return lease

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("a connection of the environment server is refused: %d are open", MAX_CONNECTIONS)
            writer.close()
            return
        task = asyncio.current_task()
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        first = await asyncio.wait_for(reader.read(1), IDLE_SECONDS)
        if not first:
            return False
        goes_on = True
        try:
            request = await asyncio.wait_for(self._read(first, reader), HEAD_SECONDS)
            goes_on = request.goes_on
            status, reply = await self._answer(request)
        except _BadRequest as error:
            status, reply, goes_on = error.status, error_json(error.status, str(error)), False
        kind, payload = ("text/event-stream", reply) if isinstance(reply, bytes) else ("application/json", json.dumps(reply).encode())
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\ncontent-type: {kind}\r\ncontent-length: {len(payload)}\r\n"
        writer.write(head.encode() + (b"" if goes_on else b"connection: close\r\n") + b"\r\n" + payload)
        await asyncio.wait_for(writer.drain(), SEND_SECONDS)
        return goes_on

    async def _read(self, first: bytes, reader: asyncio.StreamReader) -> _Request:
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _BadRequest(431, f"the head of a request is longer than {MAX_HEAD} bytes") from None
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3:
            raise _BadRequest(400, "no HTTP request")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        if self._lease_of(words[1]) is None:  # before anything of its body is kept
            raise _BadRequest(404, "the rollout of this address is over, or never was")
        if "transfer-encoding" in fields:
            raise _BadRequest(411, "a request needs its content-length")
        length = fields.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > self._max_body:
            raise _BadRequest(413, f"content-length {length[:40]}: at most {self._max_body} bytes are taken")
        body = await reader.readexactly(int(length))
        return _Request(words[0], words[1], fields.get("x-session-id", ""), body, fields.get("connection", "").lower() != "close")

    def _lease_of(self, path: str) -> Lease | None:
        lease = self._leases.get(path.removeprefix("/").partition("/")[0])
        return lease if lease is not None and lease.run is not None else None

    async def _answer(self, request: _Request) -> tuple[int, dict | bytes]:
        """Status and body: JSON, or the events of a stream."""
        route = request.path.removeprefix("/").partition("/")[2]
        lease = self._lease_of(request.path)
        if lease is None:
            return 404, error_json(404, "the rollout of this address is over, or never was")
        if request.method != "POST" or route != "v1/chat/completions":
            return 404, error_json(404, f"{request.method} /{route} is not served here: only chat completions are")
        try:
            body = json.loads(request.body)
        except ValueError as error:
            return 400, error_json(400, f"no JSON: {error}")
        if not isinstance(body, dict) or body.get("n") not in (None, 1):
            return 400, error_json(400, "one completion per request is served: n is 1")
        run, replies = lease.run, lease.replies
        session = lease.session_of(request.session)
        answered = lease.calls_of[request.session]
        messages, tools, tool_choice, sampling = split_body(body)
        model = str(body.get("model") or run.model)
        purpose = "policy" if model == run.model else "judge"
        try:
            reply = await self._calls.call(
                run,
                messages=messages,
                tools=tools,
                tool_choice=tool_choice,
                sampling=sampling,
                purpose=purpose,
                session_id=session,
                model=model,
            )
        except ModelCallError as error:
            if lease.run is run:
                lease.failure = error
            status, message = explain(error)
            return status, error_json(status, message)
        except WorkerError as error:
            return 400, error_json(400, str(error))
        completion = completion_json(reply, model)
        if lease.run is run:
            lease.failure = None
        if purpose == "policy":
            replies[completion["id"]] = reply.call_id
            answered.append(reply.call_id)
        return 200, as_stream(completion) if body.get("stream") else completion
