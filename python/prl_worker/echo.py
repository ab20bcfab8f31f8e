"""Filters of the echo algorithm: which words that others wrote are learnt."""

from prl_worker import functions
from prl_worker.errors import ConfigError


def _checked(path: str, rollout: dict, given) -> list[list[bool]]:
    """Booleans for each token of each branch, from lists, tuples or arrays."""
    branches = rollout["branches"]
    masks = [list(mask) for mask in given]
    if len(masks) != len(branches):
        raise ConfigError(f"{path} returned {len(masks)} lists for {len(branches)} branches")
    for index, (mask, branch) in enumerate(zip(masks, branches)):
        if len(mask) != len(branch["token_ids"]):
            raise ConfigError(f"{path} returned {len(mask)} booleans for the {len(branch['token_ids'])} tokens of branch {index}")
    return [[bool(is_kept) for is_kept in mask] for mask in masks]


def masks(path: str, rollouts: list[dict], /, **kwargs) -> list[list[list[bool]]]:
    """What the filter `path`, "module.name", says of each rollout; `branches` are its samples, with token_ids, sampled and roles."""
    function = functions.find(*functions.split(path))
    return [_checked(path, rollout, function(rollout, **kwargs)) for rollout in rollouts]
