"""Failures as the protocol tells them."""

import traceback

MAX_TRACEBACK = 8 * 1024
CLASSES = ("overlong", "provider", "empty", "infra", "tool", "task", "timeout", "cancelled", "config", "bug")

# Class names of both generations of the library, by what failed.
_CLASS_OF_TYPE = {
    "OverlongPromptError": "overlong",
    "EmptyModelResponseError": "empty",
    "InvalidModelResponseError": "provider",
    "ModelError": "provider",
    "ProviderError": "provider",
    "InterceptionError": "infra",
    "TunnelError": "infra",
    "SandboxError": "infra",
    "BrowserSandboxError": "infra",
    "InfraError": "infra",
    "ToolError": "tool",
    "ToolParseError": "tool",
    "ToolCallError": "tool",
    "ToolsetError": "tool",
    "HarnessError": "infra",
    "TimeoutError": "timeout",
    "CancelledError": "cancelled",
}
_RETRYABLE = {"provider", "empty", "infra", "timeout"}


class WorkerError(Exception):
    """A failure that the worker itself found. `kind` is one of CLASSES."""

    def __init__(self, kind: str, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = kind in _RETRYABLE if retryable is None else retryable


class ConfigError(WorkerError):
    """What no retry will change: arguments, packages, generations."""

    def __init__(self, message: str) -> None:
        super().__init__("config", message)


class ModelCallError(Exception):
    """The orchestrator answered a model call with an error."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class DescribedError(Exception):
    """A failure that a library described in its own record; `described` is an Err."""

    def __init__(self, described: dict) -> None:
        super().__init__(described.get("message", ""))
        self.described = described


def classify_name(name: str, message: str = "") -> str:
    """One of CLASSES by a class name alone."""
    if name in ("ProviderError", "ModelError") and "maximum context length" in message:
        return "overlong"
    return _CLASS_OF_TYPE.get(name, "task")


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < 16:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def classify(error: BaseException, default: str = "task") -> str:
    """One of CLASSES: what the innermost model call said, else by the first known class name."""
    chain = _chain(error)
    for item in chain:
        if isinstance(item, ModelCallError):
            return {"refused": "provider", "auth": "provider"}.get(item.kind, item.kind)
        if isinstance(item, WorkerError):
            return item.kind
    for item in chain:
        for cls in type(item).__mro__:
            if cls.__name__ in _CLASS_OF_TYPE:
                return _CLASS_OF_TYPE[cls.__name__]
    return default


def describe(error: BaseException, *, default: str = "task", with_traceback: bool = True) -> dict:
    """The protocol's Err."""
    if isinstance(error, DescribedError):
        return error.described
    kind = classify(error, default)
    chain = _chain(error)
    retryable = kind in _RETRYABLE
    status = None
    for item in chain:
        if isinstance(item, WorkerError):
            retryable = item.retryable
        if isinstance(item, ModelCallError):
            status = item.status
            retryable = item.kind not in ("refused", "auth", "overlong")
    described = {
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "class": kind if kind in CLASSES else default,
        "retryable": retryable,
    }
    if status is not None:
        described["status"] = status
    if len(chain) > 1:
        described["chain"] = [f"{type(item).__name__}: {item}"[:2000] for item in chain]
    if with_traceback and error.__traceback__ is not None and not isinstance(error, WorkerError):
        described["traceback"] = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return described
