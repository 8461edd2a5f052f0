"""Measure what a site takes whole and in slices, with made-up values of the right shapes."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.config import OverlapConfig
from interlace.decompose.choose import Request, SiteTimes, SliceTimes, Way
from interlace.decompose.order import hop
from interlace.decompose.rewrite.apply import Decompose
from interlace.decompose.site_costs import MatmulShape, computed_times, matmul_shapes_of, sent_value
from interlace.decompose.sites import Site
from interlace.graphs.collectives import Pending, all_gather, all_reduce, all_to_all, reduce_scatter
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import StrandGraph
from interlace.hardware.computed_costs import Machine
from interlace.ir.noise import LARGEST_SPREAD
from interlace.measure.repeats import least_noisy, spread
from interlace.ranks.small_collectives import is_first_rank, largest

REPEATS = 3
"""Measurements of each way of a site unless the caller says another number; a choice."""


class MeasuredTimes:
    """Times of sites on this machine (`choose.Times`), each shape measured once. Collective: all
    ranks ask for the same sites in the same order, and get the times of the slowest."""

    def __init__(self, device: torch.device, *, repeats: int = REPEATS) -> None:
        self.device = device
        self.repeats = repeats
        self._known: dict[tuple[Any, ...], SiteTimes] = {}
        self._log = logging.getLogger("interlace")

    @torch.no_grad()
    def __call__(self, strand: StrandGraph, site: Site, ways: Sequence[Way]) -> SiteTimes:
        """Times of a site, whole and for each way."""
        matmuls, sent = matmul_shapes_of(strand, site), sent_value(strand, site)
        key = (site.kind, site.group, tuple(matmuls), sent.shape, sent.dtype, tuple(ways))
        if key not in self._known:
            measure = partial(self._measure, _Site(site, matmuls, sent, self.device), ways)
            self._known[key], relative = least_noisy(measure, _excess)
            if _excess((self._known[key], relative)) and is_first_rank():
                self._log.warning(
                    "warning: noisy times of %s on %s: repeats spread over %.0f %% of their time, "
                    "so its slices may be poor ones",
                    site.kind, site.group, 100 * relative,
                )  # fmt: skip
        return self._known[key]

    def _measure(self, site: "_Site", ways: Sequence[Way]) -> tuple[SiteTimes, float]:
        """Times, and their interquartile ranges over them, all together."""
        samples = {"plain": self._samples(site.plain)}
        for variant, pieces in ways:
            samples[f"compute {variant} {pieces}"] = self._samples(
                site.slice_matmuls(variant, pieces)
            )
            samples[f"send {variant} {pieces}"] = self._samples(site.slice_sends(variant, pieces))
        slowest = largest({name: median(times) for name, times in samples.items()})
        spreads = largest({name: spread(times) for name, times in samples.items()})
        slices = {
            (variant, pieces): SliceTimes(
                compute_ns=slowest[f"compute {variant} {pieces}"],
                send_ns=slowest[f"send {variant} {pieces}"],
            )
            for variant, pieces in ways
        }
        relative = sum(spreads.values()) / max(1, sum(slowest.values()))
        return SiteTimes(plain_ns=slowest["plain"], slices=slices), relative

    def _samples(self, call: Callable[[], object]) -> list[int]:
        """Times of a call that all ranks begin together, the first one not counted."""
        times = []
        for _ in range(self.repeats + 1):
            self._finish()
            if dist.get_world_size() > 1:
                dist.barrier()
            begin = time.perf_counter_ns()
            call()
            self._finish()
            times.append(time.perf_counter_ns() - begin)
        return times[1:]

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _excess(measured: tuple[SiteTimes, float]) -> float:
    return max(0.0, measured[1] - LARGEST_SPREAD)


class _Site:
    """Values to run a site with."""

    def __init__(
        self, site: Site, matmuls: Sequence[MatmulShape], sent: Tensor, device: torch.device
    ) -> None:
        self.site = site
        self.rank = process_group(site.group).rank()
        rows = site.rows * site.ranks
        self.operands = [torch.rand(rows, p.inner, dtype=p.dtype, device=device) for p in matmuls]
        self.weights = [_weight(p, device) for p in matmuls]
        self.results = [torch.empty(rows, p.columns, dtype=p.dtype, device=device) for p in matmuls]
        self.sent = torch.rand(sent.shape, dtype=sent.dtype, device=device)

    def plain(self) -> None:
        """The collective and all matmuls; which comes first does not matter."""
        if self.site.kind == "expert_exchange":
            self._exchange(groups=1)
            self._matmuls_of_experts(self.site.experts)
            self._exchange(groups=1)
            return
        self._collective().work.wait()
        self._matmuls(self.site.rows * self.site.ranks)

    def _collective(self) -> Pending:
        site = self.site
        if site.kind == "gather_matmul":
            return all_gather(self.sent, site.ranks, site.group)
        if site.kind == "matmul_reduce":
            return all_reduce(self.sent, "sum", site.group, consume=True)
        return reduce_scatter(self.sent, "sum", site.ranks, site.group, consume=True)

    def _matmuls(self, rows: int) -> None:
        for x, weight, out in zip(self.operands, self.weights, self.results, strict=True):
            torch.mm(x[:rows], weight, out=out[:rows])

    def _matmuls_of_experts(self, experts: int) -> None:
        """As many matmuls, each with its share of the rows."""
        for _ in range(experts):
            self._matmuls(max(1, self.site.rows * self.site.ranks // self.site.experts))

    def _exchange(self, groups: int) -> None:
        """The rows of a group of experts, dealt evenly."""
        each = max(1, self.sent.shape[0] // (groups * self.site.ranks))
        rows, even = self.sent[: each * self.site.ranks], [each] * self.site.ranks
        all_to_all(rows, even, even, self.site.group).work.wait()

    def slice_matmuls(self, variant: str, pieces: int) -> Callable[[], None]:
        """The matmuls of one slice; of both halves where these travel apart."""
        if self.site.kind == "expert_exchange":
            return partial(self._matmuls_of_experts, -(-self.site.experts // pieces))
        rows = max(1, self.site.rows // pieces)
        parts = [max(1, rows // 2)] * 2 if variant == "bidirectional" else [rows]

        def run() -> None:
            for part in parts:
                self._matmuls(part)

        return run

    def slice_sends(self, variant: str, pieces: int) -> Callable[[], None]:
        """One slice from every rank to the next one; or half of it each way."""
        if self.site.kind == "expert_exchange":
            return partial(self._exchange, groups=pieces)
        rows = self.sent.shape[0] // (1 if self.site.kind == "gather_matmul" else self.site.ranks)
        rows = max(1, rows // pieces)
        ways = ((1, max(1, rows // 2)), (-1, max(1, rows // 2)))
        ways = ways if variant == "bidirectional" else ((1, rows),)

        def run() -> None:
            flying = [self._send(distance, part) for distance, part in ways]
            for pending in flying:
                pending.work.wait()

        return run

    def _send(self, distance: int, rows: int) -> Pending:
        to, source = [0] * self.site.ranks, [0] * self.site.ranks
        above, below = hop(self.rank, self.site.ranks, distance)
        to[above] = source[below] = rows
        return all_to_all(self.sent[:rows], source, to, self.site.group)


def _weight(matmul: MatmulShape, device: torch.device) -> Tensor:
    value = torch.empty_strided(
        (matmul.inner, matmul.columns), matmul.weight_strides, dtype=matmul.dtype, device=device
    )
    return value.uniform_()


def decompose_of(
    overlap: OverlapConfig, device: torch.device, machine: Machine | None = None
) -> Decompose | None:
    """What `[overlap]` asks for, with times computed for `machine`, or measured on this one."""
    if overlap.decompose == "off":
        return None
    request = Request(variant=overlap.decompose, pieces=overlap.pieces)
    times = computed_times(machine) if machine is not None else MeasuredTimes(device)
    return Decompose(request=request, times=times)
