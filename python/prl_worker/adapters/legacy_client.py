"""The legacy library's `Client` whose replies come over the worker's connection, and its messages in the protocol's form."""

import importlib
import json
import time

from prl_worker.adapters.openai_bridge import make_client, split_body
from prl_worker.errors import ModelCallError
from prl_worker.framing import jsonable
from prl_worker.model_calls import ModelCalls, Reply, Run


def library(name: str):
    """`verifiers.<name>`: up to 0.2 the code lies there, later releases answer for `verifiers.legacy.<name>` under that name."""
    return importlib.import_module(f"verifiers.{name}")


def _content(content):
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        return [part if isinstance(part, dict) else jsonable(part) for part in content]
    return str(content)


def _call_to_wire(call) -> dict:
    if isinstance(call, str):  # as the library saves them
        call = json.loads(call)
    if isinstance(call, dict):
        function = call.get("function")
        if isinstance(function, dict):
            return {"id": call.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": function.get("arguments") or ""}}
        return {"id": call.get("id"), "type": "function", "function": {"name": call.get("name"), "arguments": call.get("arguments") or ""}}
    function = getattr(call, "function", None)
    named = function if function is not None else call
    return {"id": call.id, "type": "function", "function": {"name": named.name, "arguments": named.arguments}}


def message_to_wire(message) -> dict:
    get = message.get if isinstance(message, dict) else lambda key, default=None: getattr(message, key, default)
    role = get("role")
    wire = {"role": "user" if role == "text" else role, "content": _content(get("content"))}
    reasoning = get("reasoning_content")
    if reasoning:
        wire["reasoning_content"] = reasoning
    calls = get("tool_calls")
    if calls:
        wire["tool_calls"] = [_call_to_wire(call) for call in calls]
    for key in ("tool_call_id", "name"):
        value = get(key)
        if value:
            wire[key] = value
    return wire


def messages_to_wire(messages) -> list[dict] | None:
    if messages is None:
        return None
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [message_to_wire(message) for message in messages]


def messages_from_wire(messages: list[dict]) -> list[dict]:
    """The library's own form of tool calls is flat."""
    out = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": call.get("id") or "", "name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
            ]
        out.append(message)
    return out


def tools_to_wire(tools) -> list[dict]:
    wire = []
    for tool in tools:
        get = tool.get if isinstance(tool, dict) else lambda key, default=None, tool=tool: getattr(tool, key, default)
        if isinstance(tool, dict) and "function" in tool:
            wire.append(tool)
            continue
        function = {"name": get("name"), "description": get("description") or "", "parameters": jsonable(get("parameters")) or {}}
        if get("strict") is not None:
            function["strict"] = get("strict")
        wire.append({"type": "function", "function": function})
    return wire


class BridgeClient(library("clients").Client):
    """One rollout's client. Empty replies are replies: a model that ends at once is no broken server."""

    def __init__(self, calls: ModelCalls, run: Run) -> None:
        super().__init__(None)
        self._calls = calls
        self._run = run

    @property
    def client(self):
        """A real AsyncOpenAI, for environments that ask the model besides their turns."""
        if self._client is None:
            self._client = make_client(self._calls, "side")
        return self._client

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        _, _, tool_choice, sampling = split_body(dict(sampling_args or {}))
        is_policy = model == self._run.model
        try:
            reply = await self._calls.call(
                self._run,
                messages=messages_to_wire(prompt),
                tools=tools_to_wire(tools or []),
                tool_choice=tool_choice,
                sampling=sampling,
                purpose="policy" if is_policy else "judge",
                model=model,
            )
        except ModelCallError as error:
            raise self._translate(error) from error
        return self._response(reply, model)

    @staticmethod
    def _translate(error: ModelCallError) -> Exception:
        kinds = library("errors")
        if error.kind == "overlong":
            return kinds.OverlongPromptError(str(error))
        if error.kind == "empty":
            return kinds.EmptyModelResponseError(str(error))
        return kinds.ModelError(str(error))

    @staticmethod
    def _response(reply: Reply, model: str):
        kinds = library("types")
        message = reply.message
        content = message.get("content")
        calls = [
            kinds.ToolCall(id=call.get("id") or "", name=call["function"]["name"], arguments=call["function"].get("arguments") or "")
            for call in message.get("tool_calls") or ()
        ]
        prompt_tokens, completion_tokens = reply.usage.get("prompt_tokens") or 0, reply.usage.get("completion_tokens") or 0
        return kinds.Response(
            id=reply.call_id,
            created=int(time.time()),
            model=reply.model or model,
            usage=kinds.Usage(
                prompt_tokens=prompt_tokens, reasoning_tokens=0, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
            ),
            message=kinds.ResponseMessage(
                content=content if content is not None else ("" if not calls else None),
                reasoning_content=message.get("reasoning_content") or None,
                tool_calls=calls or None,
                finish_reason=reply.finish_reason if reply.finish_reason in ("stop", "length", "tool_calls") else None,
                is_truncated=reply.finish_reason == "length",
                tokens=None,
            ),
        )

    # The parts of the base class that get_response above does without.

    def setup_client(self, config):
        return None

    async def to_native_tool(self, tool):
        return tools_to_wire([tool])[0]

    async def to_native_prompt(self, messages):
        return messages_to_wire(messages), {}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        return await self.get_response(prompt, model, sampling_args, tools, **kwargs)

    async def raise_from_native_response(self, response) -> None:
        return None

    async def from_native_response(self, response):
        return response

    async def close(self) -> None:
        return None
