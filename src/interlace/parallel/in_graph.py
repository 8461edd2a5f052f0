"""How a custom autograd function gets into a traced graph."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that applies a `torch.autograd.Function`, so that autograd itself traces
    it, forward and backward, operator by operator.

    Dynamo would trace the two passes apart, by calls that torch 2.13 warns of.
    """
    return cast("Callable[P, R]", torch.compiler.allow_in_graph(function))
