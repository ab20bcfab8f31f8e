"""A real AsyncOpenAI client whose requests become model calls: for judges and for environments that use one themselves."""

import json
import time
import uuid

import httpx
from openai import AsyncOpenAI

from prl_worker.errors import ModelCallError
from prl_worker.model_calls import ModelCalls, Reply, current_run

_STATUS = {"overlong": 400, "auth": 401, "refused": 403, "timeout": 504, "empty": 502, "provider": 502}
# Of a request's body: not sampling.
_NOT_SAMPLING = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "extra_body", "user", "store", "metadata"}
OVERLONG = "This model's maximum context length is exceeded: {}"


def split_body(body: dict) -> tuple[list, list, object, dict]:
    """Messages, tools, tool choice and sampling of an OpenAI chat request, in the protocol's names."""
    sampling = {key: value for key, value in (body.get("extra_body") or {}).items() if value is not None}
    sampling.update({key: value for key, value in body.items() if key not in _NOT_SAMPLING and value is not None})
    if "max_completion_tokens" in sampling:
        sampling.setdefault("max_tokens", sampling.pop("max_completion_tokens"))
    sampling.pop("logprobs", None)
    sampling.pop("top_logprobs", None)
    return body.get("messages") or [], body.get("tools") or [], body.get("tool_choice"), sampling


def completion_json(reply: Reply, model: str) -> dict:
    """The reply as an OpenAI ChatCompletion."""
    prompt, completion = reply.usage.get("prompt_tokens") or 0, reply.usage.get("completion_tokens") or 0
    message = {"content": None, **reply.message}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if reply.usage.get("cached_tokens"):
        usage["prompt_tokens_details"] = {"cached_tokens": reply.usage["cached_tokens"]}
    return {
        "id": f"chatcmpl-{reply.call_id}-{uuid.uuid4().hex[:8]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model or model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}],
        "usage": usage,
    }


def error_json(status: int, message: str) -> dict:
    return {"error": {"message": message, "type": "BridgeError", "code": status}}


def explain(error: ModelCallError) -> tuple[int, str]:
    """Status and message by which the libraries know the failure."""
    message = OVERLONG.format(error) if error.kind == "overlong" else str(error)
    return error.status or _STATUS.get(error.kind, 502), message


def as_stream(completion: dict) -> bytes:
    """The events of a completion that was asked for with stream = true."""
    choice = completion["choices"][0]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    head = {**completion, "object": "chat.completion.chunk", "usage": None}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": completion["usage"]},
    ]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


class BridgeTransport(httpx.AsyncBaseTransport):
    """Answers POST .../chat/completions with model calls of the rollout that the calling code belongs to; nothing else is served."""

    def __init__(self, calls: ModelCalls, purpose: str) -> None:
        self._calls = calls
        self._purpose = purpose

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method != "POST" or not path.endswith("/chat/completions"):
            return self._error(404, f"{request.method} {path} is not served in a worker: only chat completions are")
        body = json.loads(await request.aread())
        if body.get("n") not in (None, 1):
            return self._error(400, f"n = {body['n']}: one choice per call is served")
        messages, tools, tool_choice, sampling = split_body(body)
        run = current_run.get()
        asked = str(body.get("model") or "")
        purpose = "judge" if self._purpose == "judge" or (run is not None and asked != run.model) else self._purpose
        try:
            reply = await self._calls.call(
                run, messages=messages, tools=tools, tool_choice=tool_choice, sampling=sampling, purpose=purpose, model=asked or None, trainable=False
            )
        except ModelCallError as error:
            return self._error(*explain(error))
        completion = completion_json(reply, asked)
        if body.get("stream"):
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=as_stream(completion))
        return httpx.Response(200, json=completion)

    @staticmethod
    def _error(status: int, message: str) -> httpx.Response:
        return httpx.Response(status, json=error_json(status, message))


def make_client(calls: ModelCalls, purpose: str) -> AsyncOpenAI:
    """`purpose`: "side" or "judge". A request for another model than the rollout's is a judge's in any case."""
    return AsyncOpenAI(
        api_key="none",
        base_url="http://prl.invalid/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=BridgeTransport(calls, purpose), timeout=None),
    )
