"""Finding an environment's module and what it is written for; the process state that loading must not change."""

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import random
import re
import signal
import sys
import threading
from types import ModuleType

from prl_worker.errors import ConfigError

PACKAGES = ("verifiers", "renderers", "openai", "datasets", "mcp", "transformers", "numpy", "pydantic", "math-verify", "reasoning-gym")


def module_name(env_id: str) -> str:
    """`org/some-env@1.2` is the module `some_env`."""
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].split("==", 1)[0]
    name = name.replace("-", "_").strip()
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
        raise ConfigError(f"environment id {env_id!r} names no Python module")
    return name


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := installed(name)) is not None}


def verifiers_version() -> tuple[int, ...] | None:
    text = installed("verifiers")
    if text is None:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text.split(".dev")[0])[:3])


def has_legacy() -> bool:
    """The API of 0.1.14 to 0.3.1."""
    version = verifiers_version()
    return version is not None and (0, 1, 14) <= version <= (0, 3, 1)


def has_v1() -> bool:
    """The API of 0.4."""
    version = verifiers_version()
    return version is not None and version >= (0, 4, 0) and importlib.util.find_spec("verifiers.v1") is not None


def require(kind: str, env_id: str) -> None:
    """Raises ConfigError that says what to install."""
    version = installed("verifiers")
    wanted = {"legacy": "'verifiers>=0.1.14,<=0.3.1'", "v1": "'verifiers>=0.4,<0.5'"}[kind]
    what = {"legacy": "load_environment of the legacy API", "v1": "a task set of the v1 API"}[kind]
    if version is None:
        raise ConfigError(
            f"environment {env_id!r} needs the package verifiers, which {sys.executable} does not have; install {wanted} there"
        )
    if (kind == "legacy" and not has_legacy()) or (kind == "v1" and not has_v1()):
        raise ConfigError(
            f"environment {env_id!r} exports {what}, which verifiers {version} of {sys.executable} does not have; "
            f"give the environment a virtual environment of its own with {wanted}"
        )


def add_paths(paths: list[str]) -> None:
    for path in reversed([os.path.abspath(path) for path in paths]):
        if not os.path.isdir(path):
            raise ConfigError(f"paths: {path} is no folder")
        if path not in sys.path:
            sys.path.insert(0, path)
            # Tool servers of an environment are processes that import it again.
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()


def _names_in_source(module_path: str) -> str:
    try:
        with open(module_path, encoding="utf-8") as file:
            return file.read(200_000)
    except OSError:
        return ""


def _explain_import_failure(env_id: str, name: str, error: BaseException) -> ConfigError:
    spec = importlib.util.find_spec(name)
    source = _names_in_source(spec.origin) if spec is not None and spec.origin else ""
    missing = getattr(error, "name", None)
    version = installed("verifiers")
    if missing == name.split(".")[0] and isinstance(error, ModuleNotFoundError):
        return ConfigError(
            f"environment {env_id!r}: no module {name!r} in {sys.executable} nor in the given paths; install the environment's package"
        )
    generation = "v1" if "verifiers.v1" in source else "legacy" if "verifiers" in source else None
    if generation is not None:
        wanted = "'verifiers>=0.4,<0.5'" if generation == "v1" else "'verifiers>=0.1.14,<=0.3.1'"
        if version is None:
            return ConfigError(
                f"environment {env_id!r} needs the package verifiers, which {sys.executable} does not have; install {wanted} there"
            )
        if not (has_v1() if generation == "v1" else has_legacy()):
            return ConfigError(
                f"environment {env_id!r} is written for the {generation} API and cannot be imported with verifiers {version} "
                f"({type(error).__name__}: {error}); give it a virtual environment of its own with {wanted}"
            )
    return ConfigError(f"environment {env_id!r}: importing {name} failed: {type(error).__name__}: {error}")


def import_module(env_id: str) -> ModuleType:
    """Raises ConfigError with the reason in words."""
    name = module_name(env_id)
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        built_in = f"verifiers.v1.tasksets.{name}"
        if has_v1() and isinstance(error, ModuleNotFoundError) and error.name == name:
            try:
                return importlib.import_module(built_in)
            except ModuleNotFoundError:
                pass
        try:
            explained = _explain_import_failure(env_id, name, error)
        except (ImportError, ValueError):
            explained = ConfigError(f"environment {env_id!r}: importing {name} failed: {type(error).__name__}: {error}")
        raise explained from error


def find_kind(env_id: str, module: ModuleType) -> str:
    """"legacy" or "v1", by what the module exports: `load_environment`, or a Taskset named in `__all__`."""
    if callable(getattr(module, "load_environment", None)):
        return "legacy"
    taskset = sys.modules.get("verifiers.v1")
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", ())]
    if taskset is not None and any(isinstance(item, type) and issubclass(item, taskset.Taskset) for item in exported):
        return "v1"
    raise ConfigError(
        f"environment {env_id!r}: module {module.__name__} has neither load_environment (legacy) nor a Taskset named in __all__ (v1)"
    )


def check_arguments(env_id: str, function, arguments: dict) -> None:
    """Refuses names that would vanish in `**kwargs`: those that neither the function nor a base that the extra
    arguments may be meant for declares."""
    parameters = inspect.signature(function).parameters
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    unknown = sorted(set(arguments) - named)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = [name for name in unknown if name not in _BASE_ARGUMENTS]
    if unknown:
        raise ConfigError(
            f"environment {env_id!r} has no argument {', '.join(map(repr, unknown))}; it has {', '.join(sorted(named)) or 'none'}"
        )
    missing = sorted(
        name
        for name in named - set(arguments)
        if parameters[name].default is inspect.Parameter.empty
    )
    if missing:
        raise ConfigError(f"environment {env_id!r} needs the argument {', '.join(map(repr, missing))}")


# What `**kwargs` of load_environment is usually handed on to: the environments' own constructors.
_BASE_ARGUMENTS = {
    "system_prompt", "few_shot", "parser", "rubric", "sampling_args", "message_type", "max_workers", "max_seq_len",
    "score_rollouts", "pass_threshold", "max_turns", "timeout_seconds", "map_kwargs", "tools", "error_formatter", "stop_errors",
}  # fmt: skip


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is None and importlib.util.find_spec("numpy") is not None:
        numpy = importlib.import_module("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


_real_signal = signal.signal


def _guarded_signal(number, handler):
    """Environments install handlers when they are built, which happens in a thread here: those are left out."""
    if threading.current_thread() is threading.main_thread():
        return _real_signal(number, handler)
    return signal.getsignal(number)


@contextlib.contextmanager
def without_collector():
    """Importing a library makes hundreds of thousands of objects that stay: a collector that goes through them again and again takes a sixth
    of the time of the import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def guard_signals() -> None:
    signal.signal = _guarded_signal
