"""Lists and boundaries of chunks improved by simulated annealing (Kirkpatrick et al. 1983).

A change that makes the step longer is taken with a probability that falls with the time it costs
and, over the run, with a temperature. A million changes take some two seconds, as the loop is
compiled by numba (`annealing_kernel`); where numba is not installed, `swaps` improves lists.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from interlace.errors import InputError
from interlace.search.pipelines import annealing_kernel as kernel
from interlace.search.pipelines.chunk_layouts import ChunkLayout
from interlace.search.pipelines.climbing import MEMORY, Candidate
from interlace.search.pipelines.model_units import ModelUnit, PipelineProblem
from interlace.search.pipelines.step_clock import B, PassLists, PassNumbers, StepClock

_HOT, _COLD = 0.1, 0.001
"""First and last temperature, in mean times of a pass. Twice as hot found longer steps in as many
changes, half as hot none that were shorter."""
_FIELDS = ("forward_ns", "input_ns", "weight_ns", "saved_bytes", "kept_bytes", "held_bytes",
           "boundary_ns")  # fmt: skip
"""Of a unit, in the order of the rows of the kernel's array."""
_NO_LIMIT = 1 << 62


def anneal(problem: PipelineProblem, start: Candidate, tries: int, seed: int) -> Candidate:
    """The best of so many changes, one after the other; the same for the same seed. Memory counts
    as in `climbing`. Raises InputError for more chunks or micro-batches than a code has bits."""
    layout = start.layout
    lists, counts = as_arrays(start.lists)
    starts = np.array([*layout.starts, len(problem.units)], np.int64)
    pass_ns = sum(unit.work_ns for unit in problem.units) / (3 * len(layout.starts))
    length = kernel.anneal(
        lists, counts, starts, units_array(problem.units), np.array(layout.rank_of, np.int64),
        problem.everywhere_bytes, problem.memory_bytes or _NO_LIMIT,
        MEMORY * start.length_ns / max(1, start.peak_bytes), problem.micro_batches,
        problem.overlap, tries, max(1.0, _HOT * pass_ns), max(0.1, _COLD * pass_ns), seed,
    )  # fmt: skip
    assert length >= 0, "lists that a search starts from run"
    found = ChunkLayout(tuple(int(each) for each in starts[:-1]), layout.rank_of)
    made = from_arrays(lists, counts)
    most = StepClock(problem, found).most_bytes(made)
    return replace(start, length_ns=int(length), layout=found, lists=made, peak_bytes=most)


def units_array(units: tuple[ModelUnit, ...]) -> np.ndarray:
    """Rows are what units cost."""
    return np.array([[getattr(unit, name) for unit in units] for name in _FIELDS], np.int64)


def as_arrays(lists: PassLists) -> tuple[np.ndarray, np.ndarray]:
    """Lists as the kernel takes them, with room for every pass apart and every backward cut; and
    how long each is."""
    most = max(sum(_room(action) for action in own) for own in lists)
    found = np.zeros((len(lists), most + 1), np.int64)
    for rank, own in enumerate(lists):
        found[rank, : len(own)] = [_code(action) for action in own]
    return found, np.array([len(own) for own in lists], np.int64)


def from_arrays(lists: np.ndarray, counts: np.ndarray) -> PassLists:
    """The other way round."""
    return [
        [tuple(_passes(code)) for code in own[:count]]
        for own, count in zip(lists.tolist(), counts.tolist(), strict=True)
    ]


def _room(action: tuple[PassNumbers, ...]) -> int:
    return sum(2 if what == B else 1 for what, _, _ in action)


def _code(action: tuple[PassNumbers, ...]) -> int:
    code = 0
    for what, chunk, number in reversed(action):
        if chunk > kernel.CHUNK or number > kernel.NUMBER:
            raise InputError(
                f"chunk {chunk} and micro-batch {number} are beyond what a search takes",
                hint=f"up to {kernel.CHUNK} and {kernel.NUMBER}",
            )
        own = number << kernel.NUMBER_AT | chunk << kernel.CHUNK_AT | what
        code = code << kernel.SECOND_AT | own
    return code


def _passes(code: int) -> Iterator[PassNumbers]:
    while code:
        each = code & kernel.PASS
        yield each & 3, each >> kernel.CHUNK_AT & kernel.CHUNK, each >> kernel.NUMBER_AT
        code >>= kernel.SECOND_AT
