"""Traces as torch.profiler writes them for a GPU, made of numbers: for tests and for the script
that asks HolisticTraceAnalysis about them."""

import gzip
import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlace.ir.timeline import WAIT, Span, Timeline

COMPUTE, LINK = 7, 24
HOST, BACKWARD_THREAD = 100, 101
Work = tuple[str, float]
"""`gemm`, or a collective as NCCL calls it, and milliseconds."""


@dataclass
class TraceMaker:
    """Events of one rank. Times are microseconds."""

    rank: int = 0
    world: int = 2
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0

    def event(self, category: str, name: str, start: float, length: float, **more: Any) -> None:
        thread = more.pop("tid", HOST)
        self.events.append(
            {
                "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread,
                "ts": start, "dur": length, "args": more,
            }
        )  # fmt: skip

    def step(self, number: int, start: float, length: float) -> None:
        self.event("user_annotation", f"ProfilerStep#{number}", start, length)

    def backward(self, start: float, length: float) -> None:
        name = "autograd::engine::evaluate_function: MmBackward0"
        self.event("cpu_op", name, start, length, tid=BACKWARD_THREAD)

    def kernel(
        self, launched: float, start: float, length: float, name: str = "gemm_kernel",
        stream: int = COMPUTE, **args: Any,
    ) -> None:  # fmt: skip
        self.launches += 1
        self.event("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=self.launches)
        args |= {"stream": stream, "correlation": self.launches, "device": 0}
        self.event("kernel", name, start, length, tid=stream, **args)

    def collective(
        self, launched: float, start: float, length: float, kind: str = "AllGather",
        stream: int = LINK, **args: Any,
    ) -> None:  # fmt: skip
        """Kinds as NCCL's kernels call them."""
        known = {
            "Collective name": kind.lower(), "In msg nelems": 1000, "Out msg nelems": 2000,
            "dtype": "BFloat16", "Group size": self.world, "Process Group Name": "0",
        }  # fmt: skip
        name = f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.kernel(launched, start, length, name, stream, **(known | args))

    def write(self, path: Path) -> Path:
        group = {"pg_name": "0", "pg_desc": "tp", "pg_size": self.world}
        information = {
            "backend": "nccl", "rank": self.rank, "world_size": self.world,
            "pg_config": [group | {"ranks": list(range(self.world))}],
        }  # fmt: skip
        trace = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0}],
            "distributedInfo": information,
            "traceEvents": self.events,
        }
        text = json.dumps(trace).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        return path


def random_trace(seed: int, *, whole: bool = True) -> TraceMaker:
    """Three steps of kernels on two compute streams and two communication streams, with copies,
    fills and synchronisation in between; `whole` microseconds, or with a fraction."""
    draw = random.Random(seed)
    maker = TraceMaker(rank=seed % 4)

    def time(low: int, high: int) -> float:
        return draw.randint(low, high) + (0 if whole else draw.randrange(1000) / 1000)

    host = 1000.0
    ready = dict.fromkeys((COMPUTE, COMPUTE + 1, LINK, LINK + 1), 1000.0)
    for number in range(3):
        begin = host
        for _ in range(draw.randint(10, 30)):
            host += time(5, 20)
            stream = draw.choice([COMPUTE, COMPUTE, COMPUTE + 1, LINK, LINK, LINK + 1])
            start = max(ready[stream], host) + time(0, 30)
            length = time(1, 120)
            ready[stream] = start + length
            if stream >= LINK:
                kind = draw.choice(["AllGather", "ReduceScatter", "AllReduce", "SendRecv"])
                maker.collective(host, start, length, kind, stream)
            else:
                names = ["gemm", "add", "gemm", "Memcpy DtoD", "Memset", "wait_Sync_kernel"]
                maker.kernel(host, start, length, draw.choice(names), stream)
        host += 10
        maker.step(number, begin, host - begin - 2)
    return maker


def blocking(
    micro_batches: int, forward: list[Work], backward: list[Work], *, rank: int = 0,
    group_size: int = 2, slow: float = 1.0, group: str = "0",
) -> TraceMaker:  # fmt: skip
    """A step in which nothing overlaps, twice: the second is left out. `slow` stretches compute."""
    maker = TraceMaker(rank=rank)
    device = 1000.0
    host = 0.0
    for number in range(2):
        begin = host
        for _ in range(micro_batches):
            for works, is_backward in ((forward, False), (backward, True)):
                first = host
                for name, length in works:
                    host += 1
                    us = length * 1000 * (slow if name == "gemm" else 1)
                    if name == "gemm":
                        maker.kernel(host, device, us)
                    else:
                        maker.collective(
                            host, device, us, name,
                            **{"Group size": group_size, "Process Group Name": group},
                        )  # fmt: skip
                    device += us
                if is_backward:
                    maker.backward(first + 0.5, host - first)
                host += 1
        maker.kernel(host + 1, device, 10, "adam")
        device += 10
        host += 5
        maker.step(number, begin, host - begin - 1)
    return maker


def recorded_step(strands: str = "1", rank: int = 0) -> Timeline:
    """Two micro-batches of two layers with a gather before and a scatter after each; nothing is
    hidden with one strand, and with two half of each collective is. Times in ns."""
    spans: list[Span] = []
    now, talk = 0, 3_000_000 + 100_000 * rank
    for micro_batch in (1, 2):
        for strand, length in (("forward", 4_000_000), ("backward", 8_000_000)):
            for layer in range(2):
                for kind in ("all_gather", "reduce_scatter"):
                    name = f"{kind}_{layer}"
                    if kind == "reduce_scatter":
                        spans.append(
                            Span(f"mm_{layer}", "matmul", "compute", now, now + length, strand,
                                 micro_batch)
                        )  # fmt: skip
                        now += length
                    end = now + talk
                    spans.append(
                        Span(name, kind, "tp", now, end, strand, micro_batch, now, 1 << 20)
                    )
                    if strands == "2":
                        spans.append(
                            Span(f"other_{name}", "elementwise", "compute", now, now + talk // 2,
                                 strand, micro_batch)
                        )  # fmt: skip
                        now += talk // 2
                    spans.append(Span(name, WAIT, "compute", now, end, strand, micro_batch))
                    now = end
    spans.append(Span("adamw", "elementwise", "compute", now, now + 1_000_000))
    return Timeline(strands, rank, tuple(spans))


def digest_of(path: Path) -> str:
    """Of what a compressed trace holds, whatever packed it."""
    return hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()[:16]
