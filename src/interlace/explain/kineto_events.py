"""The events of a Kineto trace (torch.profiler) that say anything about overlap. The rest is
dropped while the file is read. Times become integer nanoseconds."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlace.explain.event_stream import EventStream

COMMUNICATION_KERNEL = re.compile(r"^nccl.*Kernel")
"""Kernels of NCCL and RCCL, as HolisticTraceAnalysis finds them."""
_COPY = re.compile(r"^(Memcpy|Memset|dma)")
"""Copies and fills, which are no compute, as in HolisticTraceAnalysis."""
_NO_COMPUTE = re.compile(r".*Memcpy|Memset|.*Sync")
"""Names that HolisticTraceAnalysis does not count as compute either."""
_BACKWARD = "autograd::engine::evaluate_function"
"""Beginning of the names of autograd's operators that run a node of the backward."""
_CPU_COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "record_param")
"""Beginnings of the names of operators that start or await communication."""
GLOO = "gloo:"
"""Beginning of the names of gloo's collectives."""
_OPTIMIZER = "Optimizer.step"
"""Beginning of the names of the annotations around an optimizer's step."""

Range = tuple[int, int]
"""Start and end, ns."""


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A kernel on a GPU."""

    name: str
    start_ns: int
    end_ns: int
    stream: int
    correlation: int
    args: Mapping[str, Any]
    """Of communication kernels only."""


@dataclass(frozen=True, slots=True)
class HostOperator:
    """An operator on a CPU, or an annotation with arguments."""

    name: str
    start_ns: int
    end_ns: int
    thread: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether it starts or awaits communication."""
        return self.name.startswith(_CPU_COMMUNICATION)


@dataclass(slots=True)
class KinetoEvents:
    """What is kept of one file."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, list[Range]] = field(default_factory=dict)
    """Annotations on the host by name."""
    kernels: list[GpuKernel] = field(default_factory=list)
    launches: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Correlation of a kernel -> when its launch began, and on which thread."""
    backwards: dict[str, list[Range]] = field(default_factory=dict)
    """By thread, when autograd ran nodes of the backward."""
    operators: list[HostOperator] = field(default_factory=list)
    """All operators on the CPU, if there are no kernels."""
    gloo: list[HostOperator] = field(default_factory=list)
    """gloo's collectives."""
    nccl_calls: int = 0
    """Collectives of NCCL that the host began."""
    optimizers: list[Range] = field(default_factory=list)
    """When optimizers stepped, on the host."""
    seen: int = 0
    """Events of the file."""
    first_ns: int = -1
    """Earliest start of an event with a duration; -1 if there is none."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep what matters of one event."""
        self.seen += 1
        if event.get("ph") != "X" or "dur" not in event or "ts" not in event:
            return
        category = str(event.get("cat", "")).lower()
        if category in _IGNORED:
            return
        start = nanoseconds(event["ts"])
        end = start + max(0, nanoseconds(event["dur"]))
        self.first_ns = start if self.first_ns < 0 else min(self.first_ns, start)
        if category in _KERNELS:
            self._take_kernel(event, start, end)
        elif "runtime" in category or "driver" in category:
            correlation = _arguments(event).get("correlation")
            if isinstance(correlation, int):
                self.launches[correlation] = (start, str(event.get("tid")))
        elif category in _HOST:
            self._take_host(event, start, end)

    def _take_kernel(self, event: Mapping[str, Any], start: int, end: int) -> None:
        args, name = _arguments(event), str(event.get("name", ""))
        if not isinstance(args.get("stream"), int) or not isinstance(args.get("correlation"), int):
            return
        communicates = COMMUNICATION_KERNEL.match(name) is not None
        if not communicates and (_COPY.match(name) or _NO_COMPUTE.match(name)):
            return
        kept = args if communicates else {}
        self.kernels.append(GpuKernel(name, start, end, args["stream"], args["correlation"], kept))
        self.operators.clear()

    def _take_host(self, event: Mapping[str, Any], start: int, end: int) -> None:
        name, thread = str(event.get("name", "")), str(event.get("tid"))
        if name.startswith(GLOO):
            self.gloo.append(HostOperator(name, start, end, thread, _arguments(event)))
            return
        if name.startswith("nccl:"):
            self.nccl_calls += 1
            return
        if "annotation" in category_of(event) or name.startswith("ProfilerStep"):
            self.marks.setdefault(name, []).append((start, end))
            if name.startswith(_OPTIMIZER):
                self.optimizers.append((start, end))
            return
        if name.startswith(_BACKWARD):
            self.backwards.setdefault(thread, []).append((start, end))
        if not self.kernels:
            self.operators.append(HostOperator(name, start, end, thread))


_KERNELS = frozenset({"kernel"})
_HOST = frozenset({"user_annotation", "cpu_op", "operator"})
_IGNORED = frozenset({"python_function", "trace", "gpu_user_annotation", "overhead"})


def category_of(event: Mapping[str, Any]) -> str:
    """The category in small letters; PyTorch before 1.12 had capitals."""
    return str(event.get("cat", "")).lower()


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def nanoseconds(microseconds: Any) -> int:
    """A time of the format as integer nanoseconds. The whole microseconds of 17 digits that some
    versions write are kept exactly. What is no number counts as 0."""
    if isinstance(microseconds, int) and not isinstance(microseconds, bool):
        return microseconds * 1000
    if isinstance(microseconds, float) and math.isfinite(microseconds):
        whole = int(microseconds)
        return whole * 1000 + round((microseconds - whole) * 1000)
    return 0


def read_kineto(path: Path) -> KinetoEvents:
    """Read one file. Raises InputError for what is no trace."""
    stream = EventStream(path)
    found = KinetoEvents(path)
    for event in stream:
        found.take(event)
    found.header = stream.header
    return found
