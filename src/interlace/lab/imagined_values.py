"""What collectives give to a rank whose peers are all like it.

One function per method of a process group: from the number of ranks, the own rank and the arguments
of the call to an `Exchange`, which says how large the collective is and how to fill its outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from interlace.errors import RunError
from interlace.ir.graph import Kind


def flat(tensors: Any) -> list[Tensor]:
    """The tensors in nested lists, in order."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in flat(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective of a rank."""

    kind: Kind
    whole: Any
    """Tensors, in nested lists, that together have the size of the collective."""
    outputs: Any
    inputs: Any = field(default=())
    fill: Callable[[], None]
    """Writes the outputs; may be called once, and later than the others were read."""

    @property
    def full_bytes(self) -> int:
        """Size of the collective, as `Cluster.collective_ns` counts it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in flat(self.whole))

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is read or written."""
        return flat([self.outputs, self.inputs])


def _reduce(tensor: Tensor, op: dist.ReduceOp, ranks: int) -> None:
    """What `ranks` equal tensors reduce to, in place."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(ranks)
    elif op == dist.ReduceOp.PRODUCT:
        tensor.pow_(ranks)


def _check_reduction(op: dist.ReduceOp) -> None:
    kinds = dist.ReduceOp
    if all(op != known for known in (kinds.SUM, kinds.AVG, kinds.MIN, kinds.MAX, kinds.PRODUCT)):
        raise RunError(
            "an imagined cluster cannot reduce by bits or by a scaled sum",
            hint="it knows sum, average, minimum, maximum and product",
        )


def all_reduce(ranks: int, _rank: int, tensors: list[Tensor], opts: Any) -> Exchange:
    """n times the tensor for a sum."""
    _check_reduction(opts.reduceOp)

    def fill() -> None:
        for tensor in tensors:
            _reduce(tensor, opts.reduceOp, ranks)

    return Exchange(kind=Kind.ALL_REDUCE, whole=tensors, outputs=tensors, fill=fill)


def all_gather(
    _ranks: int, _rank: int, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
) -> Exchange:
    """The own tensor in every place."""

    def fill() -> None:
        for places, tensor in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(tensor)

    return Exchange(kind=Kind.ALL_GATHER, whole=outputs, outputs=outputs, inputs=inputs, fill=fill)


def all_gather_singles(
    ranks: int, _rank: int, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
) -> Exchange:
    """The own tensor n times, one after the other."""

    def fill() -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(ranks, -1).copy_(tensor.reshape(1, -1))

    return Exchange(kind=Kind.ALL_GATHER, whole=outputs, outputs=outputs, inputs=inputs, fill=fill)


def all_gather_single(
    ranks: int, rank: int, output: Tensor, tensor: Tensor, opts: Any = None
) -> Exchange:
    """As `all_gather_singles`, of one tensor."""
    return all_gather_singles(ranks, rank, [output], [tensor], opts)


def reduce_scatter(
    ranks: int, rank: int, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
) -> Exchange:
    """n times the own piece for a sum."""
    _check_reduction(opts.reduceOp)

    def fill() -> None:
        for output, pieces in zip(outputs, inputs, strict=True):
            output.copy_(pieces[rank])
            _reduce(output, opts.reduceOp, ranks)

    return Exchange(
        kind=Kind.REDUCE_SCATTER, whole=inputs, outputs=outputs, inputs=inputs, fill=fill
    )


def reduce_scatter_singles(
    ranks: int, rank: int, outputs: list[Tensor], inputs: list[Tensor], opts: Any
) -> Exchange:
    """n times the own part of the tensor for a sum."""
    pieces = [list(tensor.reshape(ranks, -1).unbind()) for tensor in inputs]
    return reduce_scatter(ranks, rank, [output.view(-1) for output in outputs], pieces, opts)


def reduce_scatter_single(
    ranks: int, rank: int, output: Tensor, tensor: Tensor, opts: Any
) -> Exchange:
    """As `reduce_scatter_singles`, of one tensor."""
    return reduce_scatter_singles(ranks, rank, [output], [tensor], opts)


def all_to_all(
    ranks: int, rank: int, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
) -> Exchange:
    """From the rank d places before this one comes what this one sends d places on.

    Raises RunError if that has another size than is expected.
    """
    sources = [inputs[(2 * rank - other) % ranks] for other in range(ranks)]
    for other, (output, source) in enumerate(zip(outputs, sources, strict=True)):
        if output.numel() != source.numel():
            raise RunError(
                f"rank {other} of an imagined world would send {source.numel()} elements, and "
                f"{output.numel()} are expected",
                hint="use sizes that every rank can have alike: equal ones, for example",
            )

    def fill() -> None:
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source.view_as(output))

    return Exchange(kind=Kind.ALL_TO_ALL, whole=inputs, outputs=outputs, inputs=inputs, fill=fill)


def all_to_all_single(
    ranks: int,
    rank: int,
    output: Tensor,
    tensor: Tensor,
    output_splits: list[int],
    input_splits: list[int],
    opts: Any = None,
) -> Exchange:
    """As `all_to_all`; splits are rows per rank, and no splits mean equal ones."""
    even = [tensor.shape[0] // ranks] * ranks
    outputs = list(output.split(output_splits or even))
    return all_to_all(ranks, rank, outputs, list(tensor.split(input_splits or even)), opts)


def broadcast(_ranks: int, _rank: int, tensors: list[Tensor], opts: Any = None) -> Exchange:
    """Nothing changes: every rank has the same."""
    return Exchange(kind=Kind.BROADCAST, whole=tensors, outputs=tensors, fill=lambda: None)
