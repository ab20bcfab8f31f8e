"""One adapter per kind of environment. Each gives an `Environment` (adapters/base.py)."""

from prl_worker import loading
from prl_worker.adapters.base import Environment, LoadRequest
from prl_worker.errors import ConfigError

KINDS = ("auto", "legacy", "v1", "fake")


def available() -> list[str]:
    return ["fake"] + (["legacy"] if loading.has_legacy() else []) + (["v1"] if loading.has_v1() else [])


def build(request: LoadRequest) -> Environment:
    """Imports and builds the environment; runs in a thread of its own. Raises ConfigError, or what the environment raises."""
    if request.kind not in KINDS:
        raise ConfigError(f"kind {request.kind!r} is none of {', '.join(KINDS)}")
    if request.kind == "fake" and request.relay:
        raise ConfigError("the fake environment has no servers elsewhere")
    if request.kind == "fake":
        from prl_worker.adapters.fake import FakeEnvironment

        return FakeEnvironment(request)
    loading.add_paths(request.paths)
    module = loading.import_module(request.env_id)
    kind = loading.find_kind(request.env_id, module) if request.kind == "auto" else request.kind
    loading.require(kind, request.env_id)
    if kind == "legacy" and request.relay:
        from prl_worker.adapters.legacy_relay import LegacyRelay

        return LegacyRelay(request, module)
    if kind == "legacy":
        from prl_worker.adapters.legacy import LegacyEnvironment

        return LegacyEnvironment(request, module)
    if request.extra_env_kwargs:
        raise ConfigError(f"environment {request.env_id!r} is of the v1 API, which has no extra_env_kwargs; its settings are args and agent")
    if request.relay:
        from prl_worker.adapters.v1_relay import V1Relay

        return V1Relay(request, module)
    from prl_worker.adapters.v1 import V1Environment

    return V1Environment(request, module)
