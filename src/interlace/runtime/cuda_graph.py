"""Steps as CUDA graphs: the device launches their kernels itself, without Python in between.

Issued one by one, a kernel costs the host 10 to 50 us, and a step of a layer split over eight ranks
has kernels shorter than that: the device waits for Python. Here the first step with some number of
micro-batches runs operator by operator, as ever; then the same calls are made again under capture,
which runs nothing and notes every kernel with its order and its memory. From then on a step copies
its micro-batches to where the captured kernels read them, and replays. Kernels, order and values
are the same, and so are the bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace.errors import InputError, RunError
from interlace.graphs.collectives import group_of, is_collective, on_gloo
from interlace.graphs.module_paths import module_path
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import StrandGraph
from interlace.runtime.executor import Batch, StepExecutor
from interlace.runtime.recorder import Recorder

_OFF = "leave cuda_graph off (train.cuda_graph = false in a run file)"


class GraphMemory:
    """Memory that captured steps share. It is theirs until the last of them is dropped; steps that
    share it run in turn."""

    def __init__(self) -> None:
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        """The handle that captures take."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]
    """Where the captured kernels read micro-batches."""
    losses: list[Tensor]
    results: list[tuple[Tensor, ...]]

    def replay(self, batches: Sequence[Batch]) -> None:
        for own, given in zip(self.batches, batches, strict=True):
            for place, tensor in zip(own, given, strict=True):
                place.copy_(tensor)
        self.graph.replay()


class CapturedSteps:
    """The steps of an executor, captured once for each number of micro-batches, then replayed."""

    def __init__(self, executor: StepExecutor, memory: GraphMemory) -> None:
        self.memory = memory
        self._executor = executor
        self._captured: dict[tuple[int, bool, bool], _Captured] = {}
        self._recorded: _Captured | None = None

    def forget(self) -> None:
        """Capture anew at the next step: the tensors that a step reads or adds to are others."""
        self._captured.clear()
        self._recorded = None

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """As the executor's. Raises RunError if the step cannot be captured, after it has run."""
        captured = self._captured.get(self._key(batches))
        if captured is None:
            losses = self._executor.step(batches)
            results = self._executor.results
            self._captured[self._key(batches)] = self._capture(batches)
            self._executor.results = results
            return losses
        captured.replay(batches)
        return self._outcome(captured)

    def record(self, batches: Sequence[Batch], recorder: Recorder) -> list[Tensor]:
        """One replay whose kernels lie between stamps, which takes the memory of captures and a few
        microseconds for each operator. A step that was not captured yet is recorded operator by
        operator."""
        if self._key(batches) not in self._captured:
            return self._executor.step(batches, recorder)
        # Its events are read later, and are no more when their graph is dropped.
        self._recorded = self._capture(batches, recorder)
        self._recorded.replay(batches)
        torch.cuda.synchronize()
        return self._outcome(self._recorded)

    def _outcome(self, captured: _Captured) -> list[Tensor]:
        """Copies: the next replay writes to the same memory."""
        self._executor.results = [tuple(map(torch.clone, each)) for each in captured.results]
        return [loss.clone() for loss in captured.losses]

    def _key(self, batches: Sequence[Batch]) -> tuple[int, bool, bool]:
        """What the captured calls depend on beside the tensors."""
        executor = self._executor
        return len(batches), executor.adds_up, executor.keeps_results

    def _capture(self, batches: Sequence[Batch], recorder: Recorder | None = None) -> _Captured:
        own = [tuple(map(torch.clone, batch)) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.clone_state()
        try:
            # Other threads, as NCCL's, go on calling the driver meanwhile.
            with torch.cuda.graph(graph, pool=self.memory.pool, capture_error_mode="thread_local"):
                losses = self._executor.step(own, recorder)
                if recorder is not None:
                    recorder.clock.rejoin()
        except RuntimeError as error:
            generator.graphsafe_set_state(drawn)  # else it would wait for the end of the capture
            raise RunError(
                f"the step cannot be captured in a CUDA graph: {str(error).splitlines()[0]}",
                hint=_OFF,
            ) from error
        return _Captured(graph, own, losses, self._executor.results)


def refuse_capture(
    graphs: Mapping[str, StrandGraph], device: torch.device, *, is_pipeline: bool
) -> None:
    """Raise InputError for a step that no CUDA graph can hold: one of another device, one whose
    stages exchange messages through the host, one whose kernels depend on numbers that the host
    reads (the rows of experts, the seeds of dropout), and one whose collectives the host makes."""
    if device.type != "cuda":
        raise InputError(
            f"cuda_graph captures the kernels of a CUDA device, and this step runs on {device}",
            hint=_OFF,
        )
    if is_pipeline:
        raise InputError(
            "cuda_graph captures a step of one rank alone, and stages of a pipeline exchange "
            "messages that the host waits for",
            hint=_OFF,
        )
    for graph in graphs.values():
        for node, why in _of_the_host(graph):
            of = f" in {path}" if (path := module_path(node)) else ""
            raise InputError(f"{node.name}{of} cannot be captured: {why}", hint=_OFF)


def _of_the_host(graph: StrandGraph) -> Iterator[tuple[fx.Node, str]]:
    """Nodes that a CUDA graph cannot hold, and why. Values on the host that follow from nothing
    but the program are constants, which captured kernels have in their arguments."""
    for node in graph.graph.nodes:
        if node.op == "placeholder" and _is_on_host(node):
            yield node, "the host reads it anew at each step, as the seeds of dropout"
        elif (
            node.op == "call_function"
            and _is_on_host(node)
            and any(_is_on_device(source) for source in node.all_input_nodes)
        ):
            yield node, "the host waits for a value of the device, as for the rows of experts"
        elif is_collective(node) and on_gloo("cuda", process_group(group_of(node))):
            yield node, "gloo sends it, which is the host"


def _values(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, Tensor):
            yield each


def _is_on_host(node: fx.Node) -> bool:
    return any(each.device.type == "cpu" for each in _values(node))


def _is_on_device(node: fx.Node) -> bool:
    return any(each.device.type == "cuda" for each in _values(node))
