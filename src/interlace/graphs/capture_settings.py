"""How a forward is captured: sizes as numbers, logs left out, recurrent layers step by step."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_LOGGED = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")


def capture_settings() -> dict[str, Any]:
    """Settings of torch's capture, by name."""
    return {
        # Else a second capture of the same code with other sizes would have symbols for sizes.
        "automatic_dynamic_shapes": False,
        "allow_rnn": True,
        "ignore_logger_methods": _logging_functions(),
    }


def changes_nothing(item: object, name: str, value: object) -> bool:
    """Whether this value is set where it is already: a whole number, a word, a flag or None, as
    forwards that set the same at every call do after their first one (the windows of Swin)."""
    if value is not None and not isinstance(value, (bool, int, str)):
        return False
    before = vars(item).get(name, vars) if hasattr(item, "__dict__") else vars
    return type(before) is type(value) and before == value


def _logging_functions() -> set[Callable[..., Any]]:
    """The methods of loggers that write, those that libraries have added to do so once
    (`warning_once` of transformers) among them, and `warnings.warn`. They give nothing back, so no
    number depends on them."""
    found = [
        each
        for name, each in vars(logging.Logger).items()
        if name in _LOGGED or name.endswith("_once")
    ]
    return {*found, warnings.warn}


@contextmanager
def without_fused_recurrence(module: nn.Module) -> Iterator[None]:
    """Inside, LSTM and GRU are captured as matmuls: oneDNN's layer for a CPU hands its backward a
    buffer that no graph can keep."""
    if not any(isinstance(each, nn.RNNBase) for each in module.modules()):
        yield
        return
    with warnings.catch_warnings():
        # Said whenever these flags are set on other machines than Intel's GPUs.
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextmanager
def tensors_put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards every sub-module has the parameters and buffers that it has now, by the same
    names. The joint export swaps those of all names for its own; a sub-module that stands under two
    names is swapped twice, and torch would put back the first swap's."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for each in module.modules()
        for table in (each._parameters, each._buffers)
    ]
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)
