"""Policy losses written in Python: what the trainer asks of them, and the gradient of what they return."""

import importlib.util
import math
import struct
from dataclasses import dataclass, field
from typing import Any

from prl_worker import functions
from prl_worker.errors import ConfigError


@dataclass
class LossInputs:
    """One sequence, entry i about token i. Tensors where torch is installed, else lists; what was not asked for is None."""

    trainer_logprobs: Any  # requires_grad where it is a tensor; 0 at tokens that no loss needs
    inference_logprobs: Any
    ref_logprobs: Any
    advantages: Any
    loss_mask: Any  # of bools: the tokens that train
    loss_weights: Any


@dataclass
class LossOutputs:
    """The sum over the sequence's tokens; the trainer divides by the number of tokens of the whole step."""

    loss: Any
    metrics: dict = field(default_factory=dict)
    gradient: Any = None  # of the loss by trainer_logprobs, a number for each token; None: by autograd, where the loss is a tensor


def _torch():
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(1)  # sums in one order
    return torch


def _numbers(text: str | None, code: str) -> list | None:
    if text is None:
        return None
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _inputs(sequence: dict, torch) -> LossInputs:
    values = {name: _numbers(sequence.get(name), "f") for name in ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_weights")}
    values["loss_mask"] = [member != 0 for member in _numbers(sequence["loss_mask"], "B")]
    if torch is not None:
        values = {name: None if numbers is None else torch.tensor(numbers) for name, numbers in values.items()}
        values["trainer_logprobs"].requires_grad_(True)
    return LossInputs(**values)


def _outputs(value) -> LossOutputs:
    """From what the function returned: an object with these attributes, a table, or a pair or triple."""
    if isinstance(value, tuple) and 1 <= len(value) <= 3:
        return LossOutputs(*value)
    if isinstance(value, dict) and "loss" in value:
        return LossOutputs(value["loss"], value.get("metrics") or {}, value.get("gradient"))
    if hasattr(value, "loss"):
        return LossOutputs(value.loss, getattr(value, "metrics", None) or {}, getattr(value, "gradient", None))
    raise ConfigError(f"returned a {type(value).__name__}, wanted (loss, metrics), (loss, metrics, gradient) or an object with those attributes")


def _gradient(outputs: LossOutputs, inputs: LossInputs, torch) -> list[float]:
    if outputs.gradient is not None:
        gradient = [float(number) for number in outputs.gradient]
    elif torch is None or not isinstance(outputs.loss, torch.Tensor):
        raise ConfigError(f"returned no gradient, and the loss is a {type(outputs.loss).__name__}: return (loss, metrics, gradient), or a torch tensor")
    elif not outputs.loss.requires_grad:
        raise ConfigError("the loss does not depend on trainer_logprobs: something cuts it off, as detach() does")
    else:
        (found,) = torch.autograd.grad(outputs.loss.sum(), inputs.trainer_logprobs, allow_unused=True)
        gradient = [0.0] * len(inputs.trainer_logprobs) if found is None else found.tolist()
    if len(gradient) != len(inputs.trainer_logprobs):
        raise ConfigError(f"returned {len(gradient)} gradients for {len(inputs.trainer_logprobs)} tokens")
    return gradient


def _metric(name, value) -> float:
    try:
        number = float(value.detach().float().mean() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is no number: {error}") from error
    return number


def _one(function, sequence: dict, kwargs: dict, torch) -> dict:
    inputs = _inputs(sequence, torch)
    outputs = _outputs(function(inputs, **kwargs))
    gradient = _gradient(outputs, inputs, torch)
    loss = float(outputs.loss.detach().sum() if hasattr(outputs.loss, "detach") else outputs.loss)
    metrics = {str(name): _metric(name, value) for name, value in outputs.metrics.items()}
    return {  # numbers as bytes: the trainer says whose loss is not finite
        "loss": struct.pack("<d", loss).hex(),
        "gradient": struct.pack(f"<{len(gradient)}d", *gradient).hex(),
        "metrics": {name: number for name, number in metrics.items() if math.isfinite(number)},
    }


def evaluate(path: str, sequences: list[dict], /, **kwargs) -> list[dict]:
    """The loss `path`, "module.name", of each sequence. Without sequences: whether it is there."""
    function = functions.find(*functions.split(path))
    torch = _torch()
    answers = []
    for sequence in sequences:
        try:
            answers.append(_one(function, sequence, kwargs, torch))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return answers
