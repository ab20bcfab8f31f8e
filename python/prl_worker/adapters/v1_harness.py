"""The library's chat program as a loop in this process: no interpreter and no HTTP for each exchange. Its texts are those of the
library's own program, so that a conversation is the same in both."""

import asyncio
import contextlib
import json

from multidict import CIMultiDict
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils import mcp as mcp_utils
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.runtimes import ProgramResult

from prl_worker.adapters import v1_bridge

__all__ = ["PrlChatHarness"]

CONNECT_S = 60.0
_DIALECT = ChatDialect()


class PrlChatConfig(HarnessConfig):
    id: str = "prl-chat"


class _Request(dict):
    """As much of an aiohttp request as the interception server looks at."""

    path = "/v1/chat/completions"
    content_length = None

    def __init__(self, secret: str, body: bytes) -> None:
        super().__init__()
        self.headers = CIMultiDict({"Authorization": f"Bearer {secret}", "Content-Type": "application/json"})
        self._read_bytes = body

    async def read(self) -> bytes:
        return self._read_bytes


class Refused(Exception):
    """The model's side answered with an HTTP error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status

    @property
    def is_overflow(self) -> bool:
        return self.status in (400, 413) and any(marker in str(self).casefold() for marker in CONTEXT_OVERFLOW_MARKERS)


async def _complete(server, secret: str, body: dict) -> dict:
    request = _Request(secret, json.dumps(body).encode())
    # A task of its own: the server cancels those that serve a rollout when the rollout is over.
    response = await asyncio.create_task(server._handler_for(_DIALECT)(request))
    if response.status != 200:
        raise Refused(response.status, bytes(response.body or b"").decode("utf-8", errors="replace")[:4000])
    return json.loads(response.body)


class _Tools:
    """The tool servers of one rollout: their schemas, and calls by advertised name."""

    def __init__(self) -> None:
        self.schemas: list[dict] = []
        self._dispatch: dict[str, tuple] = {}
        self._remote: tuple[dict, dict] = ({}, {})

    async def connect(self, urls: dict[str, str], timeout: float, stack: contextlib.AsyncExitStack) -> None:
        remote = {name: {"url": url, "timeout": timeout} for name, url in urls.items() if not url.startswith(v1_bridge.LOCAL_TOOLS)}
        if remote:
            schemas, dispatch, servers = await asyncio.wait_for(mcp_utils.connect_mcp({"mcpServers": remote}, stack), CONNECT_S)
            self.schemas += schemas
            self._remote = (servers, dispatch)
        for name, url in urls.items():
            local = v1_bridge.local_toolset(url)
            if local is not None:
                await self._add_local(name, local, stack)

    async def _add_local(self, name: str, local, stack: contextlib.AsyncExitStack) -> None:
        from mcp import Client

        client = await stack.enter_async_context(Client(local.server))
        for tool in (await client.list_tools()).tools:
            full = f"{name}_{tool.name}" if name else tool.name
            if full in self._dispatch or full in self._remote[1]:
                raise ValueError(f"duplicate tool name {full!r}; keep MCP tool names qualified")
            parameters = tool.input_schema
            self.schemas.append({"type": "function", "function": {"name": full, "description": tool.description or "", "parameters": parameters}})
            self._dispatch[full] = (client, tool.name)

    async def call(self, name: str, raw_arguments: str):
        try:
            arguments = json.loads(raw_arguments or "{}")
        except json.JSONDecodeError as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        if not isinstance(arguments, dict):
            return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
        if name in self._dispatch:
            client, bare = self._dispatch[name]
            return mcp_utils.mcp_content_to_chat_content((await client.call_tool(bare, arguments)).content)
        servers, dispatch = self._remote
        if name in dispatch:
            return await mcp_utils.call_mcp(servers, dispatch, name, arguments)
        return f"error: unknown tool {name!r}"


class PrlChatHarness(Harness[PrlChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    # It gives the model no tool of its own, only those of the task: as verifiers' "null", which it stands in for. Environments that need a harness that
    # runs code (a judge that is an agent) read this and refuse to start.
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        server = v1_bridge.server_of(secret)
        if server is None:
            return ProgramResult(exit_code=1, stdout="", stderr="no interception server knows this rollout")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages += [{"role": "user", "content": prompt}] if prompt else []
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        try:
            async with contextlib.AsyncExitStack() as stack:
                tools = _Tools()
                if mcp_urls:
                    await tools.connect(mcp_urls, self.config.tool_timeout, stack)
                await self._chat(server, secret, ctx.model, messages, tools, tool_interception_url is not None)
        except Refused as error:
            if not error.is_overflow:
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _chat(self, server, secret: str, model: str, messages: list[dict], tools: _Tools, is_gated: bool) -> None:
        """Until a reply without tool calls."""
        while True:
            body = {"model": model, "messages": messages}
            if tools.schemas:
                body["tools"] = tools.schemas
            completion = await _complete(server, secret, body)
            message = {key: value for key, value in completion["choices"][0]["message"].items() if value is not None}
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                messages.append(await self._tool_message(server, secret, call, tools, is_gated))

    @staticmethod
    async def _tool_message(server, secret: str, call: dict, tools: _Tools, is_gated: bool) -> dict:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or ""
        if is_gated:
            try:
                parsed = json.loads(arguments or "{}")
            except json.JSONDecodeError:
                parsed = arguments
            decision = await server.sessions[secret].decide_tool(call["id"], name, parsed)
            if decision["action"] == "stop":
                raise Refused(400, f"rollout stopped: {decision['reason']}")
            if decision["action"] == "deny":
                return bound_tool_message(decision["message"])
        content = await tools.call(name, arguments)
        return bound_tool_message({"role": "tool", "tool_call_id": call["id"], "content": content, "name": name})
