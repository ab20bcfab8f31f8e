"""Where the v1 library is led to this worker: its model clients, its judges, its chat harness and its tool servers.

Four names of the library are replaced, each once in a process (`install`):
  interception.server.resolve_client    every model client of a rollout
  interception.server.InterceptionServer.register   to find the server of a rollout without HTTP
  judge.build_async_openai               clients of judges, unless they are to use their own
  rollout.serve_tools                    tool servers of a rollout, unless they are to be processes
"""

import contextlib
import contextvars
import functools
import itertools
import sys
import weakref
from dataclasses import dataclass, field

import verifiers.v1 as vf
from verifiers.v1 import judge as judge_module
from verifiers.v1 import rollout as rollout_module
from verifiers.v1.clients.client import Client
from verifiers.v1.dialects.chat import parse_message
from verifiers.v1.errors import ProviderError, ToolsetError
from verifiers.v1.interception import server as server_module
from verifiers.v1.types import Response, Usage

from prl_worker.adapters.openai_bridge import OVERLONG, completion_json, make_client, split_body
from prl_worker.errors import ModelCallError
from prl_worker.model_calls import ModelCalls, Run

# A client that the library takes for one that gives tokens: it is asked for whole replies, never for a stream.
CLIENT_CONFIG = vf.TrainClientConfig(base_url="http://prl.invalid/v1", api_key_var="PRL_NO_KEY")
LOCAL_TOOLS = "prl-tools://"
_STATUS = {"overlong": 400, "auth": 401, "refused": 403, "timeout": 504}

tools_in_process: contextvars.ContextVar[bool] = contextvars.ContextVar("prl_tools_in_process", default=False)


@dataclass(eq=False)
class Seat:
    """One agent's run within a rollout, and the calls behind its nodes."""

    run: Run
    trace: object
    session_id: str
    replies: list[str] = field(default_factory=list)  # call ids in the order of the replies

    def branches(self) -> list[list[str]]:
        """Call ids along each path; empty if the library kept other calls than were answered."""
        kept = [call for call in self.trace.calls if call.error is None and call.node is not None]
        if len(kept) != len(self.replies):
            return []
        call_of = {call.node: call_id for call, call_id in zip(kept, self.replies)}
        by_identity = {id(node): place for place, node in enumerate(self.trace.nodes)}
        paths = []
        for branch in self.trace.branches:
            path = [call_of[place] for node in branch.nodes if (place := by_identity.get(id(node))) in call_of]
            if path and branch.trainable:
                paths.append(path)
        return paths


_seats: dict[str, Seat] = {}  # by trace id
_servers: "weakref.WeakValueDictionary[str, object]" = weakref.WeakValueDictionary()  # by the secret of a rollout
_local_tools: dict[str, object] = {}  # by URL
_sessions: "weakref.WeakValueDictionary[str, object]" = weakref.WeakValueDictionary()  # by trace id
_next_tools = itertools.count(1)
_calls: ModelCalls | None = None
_harness_id = ""


def seat(run: Run, trace, session_id: str) -> Seat:
    new = Seat(run, trace, session_id)
    _seats[trace.id] = new
    return new


def forget(known: Seat) -> None:
    _seats.pop(known.trace.id, None)


def server_of(secret: str):
    """The interception server that knows a rollout by this secret, or None."""
    return _servers.get(secret)


def local_toolset(url: str):
    return _local_tools.get(url)


class BridgeClient(Client):
    """The model of every rollout of this process; which rollout a call belongs to is told by the trace."""

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        if dialect.upstream_path != "/chat/completions":
            raise ProviderError(f"calls of {dialect.upstream_path} cannot be made from a worker: only chat completions can", status_code=501)
        known = _seats.get(session_id)
        if known is None:
            raise ProviderError("the rollout of this call is over", status_code=409)
        messages, tools, tool_choice, settings = split_body(body)
        model = str(body.get("model") or known.run.model)
        agent = known.trace.agent
        try:
            reply = await _calls.call(
                known.run,
                messages=messages,
                tools=tools,
                tool_choice=tool_choice,
                sampling=settings,
                purpose="policy" if model == known.run.model else "judge",
                session_id=known.session_id,
                seat=agent.name,
                trainable=agent.trainable,
                model=model,
            )
        except ModelCallError as error:
            message = OVERLONG.format(error) if error.kind == "overlong" else str(error)
            raise ProviderError(message, status_code=error.status or _STATUS.get(error.kind, 502)) from error
        known.replies.append(reply.call_id)
        raw = completion_json(reply, model)
        used = reply.usage
        return Response(
            id=reply.call_id,
            created=raw["created"],
            model=raw["model"],
            message=parse_message(raw["choices"][0]["message"]),
            finish_reason=reply.finish_reason if reply.finish_reason in ("stop", "length", "tool_calls") else None,
            usage=Usage(
                prompt_tokens=(used.get("prompt_tokens") or 0) - (used.get("cached_tokens") or 0),
                completion_tokens=used.get("completion_tokens") or 0,
                cached_input_tokens=used.get("cached_tokens"),
            ),
            raw=raw,
        )


class LocalToolset:
    """A tool server of one rollout without a process: the library's own object behind an MCP client in memory."""

    def __init__(self, toolset, session) -> None:
        self._toolset = toolset
        self._session = session
        self.url = f"{LOCAL_TOOLS}{next(_next_tools)}"
        self.server = None

    async def start(self) -> None:
        from mcp.server.mcpserver import MCPServer

        toolset, session = self._toolset, self._session

        async def pull():
            state = session.trace.state
            return state.model_copy(deep=True) if isinstance(state, toolset._state_cls) else toolset._state_cls()

        async def push(before: bytes) -> None:
            from verifiers.v1.mcp import server as module

            state = module._call_state.get()
            if state is not None and not session.released and isinstance(session.trace.state, type(state)):
                session.trace.state = state

        toolset._pull_state, toolset._push_state = pull, push
        await toolset.setup()
        await toolset.setup_task(session.trace.task.data)
        self.server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(self.server)

    async def stop(self) -> None:
        await self._toolset._exit_stack.aclose()


def _can_be_local(toolset) -> bool:
    config = toolset.config
    return not config.url and getattr(config.runtime, "type", "") == "subprocess"


_real_serve_tools = rollout_module.serve_tools


@contextlib.asynccontextmanager
async def _serve_tools(toolsets, harness_runtime, shared=None, *, state_secret="", state_route="", state_base=None):
    session = _sessions.get(state_route)
    is_local = tools_in_process.get() and session is not None and _plays_here(session)
    local = [toolset for toolset in toolsets if is_local and _can_be_local(toolset)]
    others = [toolset for toolset in toolsets if toolset not in local]
    options = {"shared": shared, "state_secret": state_secret, "state_route": state_route, "state_base": state_base}
    async with contextlib.AsyncExitStack() as stack:
        urls = dict(await stack.enter_async_context(_real_serve_tools(others, harness_runtime, **options)))
        for toolset in local:
            if toolset.server_name in urls:
                raise ToolsetError(f"two tool servers are named {toolset.server_name!r}")
            server = LocalToolset(toolset, session)
            stack.push_async_callback(server.stop)
            await server.start()
            _local_tools[server.url] = server
            stack.callback(_local_tools.pop, server.url, None)
            urls[toolset.server_name] = server.url
        yield urls


def _plays_here(session) -> bool:
    """Whether the seat's harness is ours, the only one that knows our URLs."""
    return session.trace.agent.config.harness is not None and session.trace.agent.config.harness.id == _harness_id


def _register(self, session):
    secrets = _real_register(self, session)
    _servers[secrets[0]] = self
    _sessions[session.trace.id] = session
    return secrets


_real_register = server_module.InterceptionServer.register
_real_build_client = judge_module.build_async_openai


def _remember_signatures() -> None:
    """pydantic asks for the signature of each default factory each time it makes a model unchecked, as the library does for every
    node; for `dict` and `list` Python parses their text and copies sys.modules, a megabyte and milliseconds a rollout."""
    from pydantic._internal import _fields

    ask = getattr(_fields, "takes_validated_data_argument", None)
    if ask is None or hasattr(ask, "cache_info"):
        return
    remembered = functools.lru_cache(maxsize=4096)(ask)

    @functools.wraps(ask)
    def takes_validated_data_argument(factory):
        try:
            return remembered(factory)
        except TypeError:  # not hashable
            return ask(factory)

    takes_validated_data_argument.cache_info = remembered.cache_info
    _fields.takes_validated_data_argument = takes_validated_data_argument


def install(harness_id: str, calls: ModelCalls, *, call_judges: bool) -> None:
    global _calls, _harness_id
    _calls, _harness_id = calls, harness_id
    from prl_worker.adapters import v1_harness

    _remember_signatures()
    sys.modules[harness_id.replace("-", "_")] = v1_harness
    server_module.resolve_client = lambda config: BridgeClient()
    server_module.InterceptionServer.register = _register
    rollout_module.serve_tools = _serve_tools
    judge_module.build_async_openai = (lambda config: make_client(calls, "judge")) if call_judges else _real_build_client
