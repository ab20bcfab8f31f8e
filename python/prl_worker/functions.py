"""Functions that a configuration names."""

import importlib
import sys

from prl_worker.errors import ConfigError


def find(module: str, name: str):
    """The function `name`, with dots for what is inside of something, of a module that can be imported."""
    path = f"{module}.{name}"
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"function {path}: {type(error).__name__}: {error} ({sys.executable})") from error
    if not callable(found):
        raise ConfigError(f"function {path} is a {type(found).__name__}, wanted a function")
    return found


def split(path: str) -> tuple[str, str]:
    """Module and name of "module.name"."""
    module, _, name = path.rpartition(".")
    if not module or not name:
        raise ConfigError(f"function {path!r}: wanted module.name")
    return module, name
