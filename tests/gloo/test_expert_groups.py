"""Exchanges of experts cut by groups of experts, against whole exchanges, on two ranks in float64.

Uneven groups, rows without an expert, a shared expert beside, experts without rows, recomputation,
one strand and two, chunks on one rank, and the ends of a step alone. Both compute the same matmuls,
whose last bits may follow from where rows lie in memory.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import gloo_group, run_ranks
from test_expert_overlap import CASES, PLAN, RANKS, Layers, output
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from traced_once import traced_once

from interlace.api import compile_step
from interlace.config import OverlapConfig
from interlace.experts.pieces import (
    EXPERT_ROWS,
    counts_of_piece,
    token_rows_of_piece,
    token_rows_of_pieces,
)
from interlace.parallel.expert import apply_expert_parallel

pytestmark = pytest.mark.gloo
MICRO_BATCHES, SHAPE = 3, (8, 2, 16)
BOUND = 1e-12
"""Largest difference, relative to the largest element."""
WAYS: dict[str, dict[str, Any]] = {
    "2 groups": {"overlap": OverlapConfig(decompose="ring", pieces=2)},
    "3 groups": {"overlap": OverlapConfig(decompose="slicing", pieces=3)},
    "3 groups, two strands": {
        "schedule": "two_strand",
        "overlap": OverlapConfig(decompose="slicing", pieces=3, passes="all"),
    },
    "folded": {
        "schedule": "folded",
        "split_at": ["layers.1"],
        "overlap": OverlapConfig(decompose="direct", pieces=9),
    },
    "ends": {
        "schedule": "two_strand",
        "overlap": OverlapConfig(decompose="ring", pieces=2, passes="ends"),
    },
}
"""Each against one strand whose exchanges are whole."""
GROUPS = {"2 groups": 2, "3 groups": 3, "3 groups, two strands": 3, "folded": 4, "ends": 2}
"""As many as were asked for, and at most as many as a rank has experts."""
PLAIN, MIXED, DEEP = CASES
RUNS = (
    (PLAIN, False, ("2 groups", "ends")),
    (PLAIN, True, ("2 groups",)),
    (MIXED, False, ("3 groups", "3 groups, two strands")),
    (DEEP, False, ("folded",)),
)
"""Case, whether layers are computed again in the backward, and the ways to run it."""


class Recomputed(nn.Module):
    """The same layers, each computed again in the backward."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.inner = layers

    def forward(self, x_SBD: Tensor) -> Tensor:
        for layer in self.inner.layers:
            found: Any = checkpoint(layer, x_SBD, use_reentrant=False)
            x_SBD = getattr(found, "x", found)
        return x_SBD


def _module(case: str, mesh: DeviceMesh, *, recomputed: bool) -> nn.Module:
    torch.manual_seed(3)
    module = Layers(*CASES[case][:2]).double()
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.3)
        if "router" in name:
            parameter.data[:3] = 0  # ties, and experts that few tokens take
    apply_expert_parallel(module, mesh["ep"])
    return Recomputed(module) if recomputed else module


def _bits(module: nn.Module, mesh: DeviceMesh, **options: Any) -> tuple[list[Tensor], Any]:
    draw = torch.Generator().manual_seed(mesh.get_rank())
    pull = torch.ones((), dtype=torch.double)
    inputs = [torch.randn(SHAPE, dtype=torch.double, generator=draw) for _ in range(MICRO_BATCHES)]
    step = compile_step(module, output, (inputs[0], pull), mesh=mesh, config=PLAN, **options)
    loss = step([(each, pull) for each in inputs])
    found = [loss, *(each[0] for each in step.results)]
    return found + [p.grad for p in module.parameters() if p.grad is not None], step


def _off(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def child_groups() -> dict[str, Any]:
    """Of each case and way: how far values are off, whether two strands have the bits of one, and
    what was cut."""
    found: dict[str, Any] = {}
    with gloo_group():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        for case, recomputed, ways in RUNS:
            name = f"{case}{', recomputed' if recomputed else ''}"
            with traced_once():
                of_ways = _by_way(case, recomputed, ways, mesh)
            found |= {f"{name}: {way}": each for way, each in of_ways.items()}
    return found


def _by_way(
    case: str, recomputed: bool, ways: tuple[str, ...], mesh: DeviceMesh
) -> dict[str, dict[str, Any]]:
    module = _module(case, mesh, recomputed=recomputed)
    wanted, _ = _bits(module, mesh, schedule="one_strand")
    before, found = wanted, {}
    for way in ways:
        module = _module(case, mesh, recomputed=recomputed)
        bits, step = _bits(module, mesh, **{"schedule": "one_strand", **WAYS[way]})
        cut = [each for each in step.decomposed.choices if each.variant]
        same = way.endswith("two strands")
        found[way] = {
            "layers": sum(not dense for dense in CASES[case][0]),
            "off": max(map(_off, bits, wanted)),
            "bits": not same or all(map(torch.equal, bits, before)),
            "pieces": [each.pieces for each in cut],
            "strands": sorted(each.site.strand for each in cut),
        }
        before = bits
    return found


def test_groups_compute_what_whole_exchanges_do() -> None:
    results = run_ranks("test_expert_groups:child_groups", RANKS, timeout_s=200)
    for found in (result.value for result in results):
        assert len(found) == sum(len(ways) for *_, ways in RUNS)
        for name, way in found.items():
            assert way["off"] < BOUND, (name, way)
            assert way["bits"], (name, way)
            assert way["strands"] == sorted(["backward", "forward"] * way["layers"]), (name, way)
            groups = GROUPS[name.rpartition(": ")[2]]
            assert way["pieces"] == [groups] * 2 * way["layers"], (name, way)


@given(
    sent=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    dropped=st.integers(0, 3),
    ends=st.sampled_from([(3,), (1, 3), (2, 3), (1, 2, 3)]),
)
def test_rows_of_pieces_are_all_rows(sent: list[int], dropped: int, ends: tuple[int, ...]) -> None:
    """On the side of the tokens of 2 ranks with 3 experts each, and on that of the experts; also
    where experts have no rows."""
    counts, total = torch.tensor([sent, sent]), sum(sent)
    tokens = torch.arange(float(total + dropped))[:, None].expand(-1, 2)
    by_expert = torch.arange(float(total))[:, None]
    taken, cut, first = [], [], 0
    for last in ends:
        of_piece = counts_of_piece(counts, 2, first, last)
        taken.append(token_rows_of_piece(tokens, counts, 2, first, last, 0))
        cut.append(EXPERT_ROWS(by_expert, counts, 2, first, last, 0, 0))
        assert len(taken[-1]) == len(cut[-1]) == of_piece[0].sum() == of_piece[1].sum()
        first = last
    whole = token_rows_of_pieces(taken, counts, 2, ends, total + dropped)
    assert torch.equal(whole[:total], tokens[:total])
    assert not whole[total:].any()
    assert torch.equal(torch.cat(cut), by_expert)
