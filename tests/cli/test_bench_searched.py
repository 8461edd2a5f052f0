"""The bench of searched pipelines without its ranks: the model is the one that the costs describe,
and rows say what was emulated."""

import pytest
import torch

from interlace.bench.searched import EMULATED, RANKS, compare, rows_of
from interlace.bench.searched_model import (
    UnevenSize,
    measured,
    measuring_starts,
    whole_blocks,
)
from interlace.bench.searched_world import UnevenGpt

SMALL = UnevenSize(blocks=14, micro_batches=4)
COUNTED = ("forward_ns", "input_ns", "weight_ns")


def test_units_are_the_matmuls_of_the_model() -> None:
    """Weights of each unit's matmuls times two FLOPs a token, at the emulated rate; the head takes
    as long as three and a half blocks, as 128,256 words do at a width of 3072."""
    model = UnevenGpt(SMALL)
    units = SMALL.units()
    words, *halves, head = units
    assert (words.forward_ns, len(halves)) == (0, 2 * SMALL.blocks)
    for unit in halves:
        part = model.get_submodule(unit.name)
        weights = sum(p.numel() for p in part.parameters() if p.dim() == 2)
        assert unit.forward_ns == round(2 * SMALL.tokens * weights / SMALL.flops_per_s * 1e9)
    _, *blocks, _ = whole_blocks(units)
    assert [block.name for block in blocks] == [half.name for half in halves[::2]]
    for name in (*COUNTED, "saved_bytes", "kept_bytes", "held_bytes"):
        assert sum(getattr(u, name) for u in blocks) == sum(getattr(u, name) for u in halves)
    assert [b.forward_ns > blocks[0].forward_ns for b in blocks] == [
        number % 6 == 5 for number in range(SMALL.blocks)
    ]
    assert head.forward_ns / blocks[0].forward_ns == pytest.approx(
        2 * 3072 * 128_256 / (2 * 12 * 3072**2), rel=0.01
    )


def test_what_chunks_took_is_dealt_to_their_units() -> None:
    """Embedding and head are chunks of their own; what others took beside matmuls is shared out
    evenly, and is never less than nothing."""
    units = SMALL.units()
    starts = measuring_starts(units, 2 * RANKS)
    ends = (*starts[1:], len(units))
    assert (starts[:2], starts[-1], len(starts)) == ((0, 1), len(units) - 1, 2 * RANKS)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)][1:-1]
    assert max(sizes) - min(sizes) <= 1
    more = (2000, 3000, 5000)
    chunks = [
        tuple(
            sum(getattr(unit, name) + ns for unit in units[start:end])
            for name, ns in zip(COUNTED, more, strict=True)
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    for known, unit in zip(units, measured(units, chunks), strict=True):
        took = [getattr(unit, name) - getattr(known, name) for name in COUNTED]
        assert took == list(more)
    instant = [chunks[0], *[(0, 0, 0)] * (len(chunks) - 2), chunks[-1]]
    assert measured(units, instant)[1:-1] == units[1:-1]


def test_chunks_are_parts_of_one_model() -> None:
    """Run one after the other they are the whole, bit by bit."""
    whole = UnevenGpt(SMALL)
    x = value = torch.randint(SMALL.words, (1, 8), generator=torch.Generator().manual_seed(3))
    for first, last in ((0, 5), (5, 6), (6, 2 * SMALL.blocks + 2)):
        value = UnevenGpt(SMALL, first, last)(value)
    assert value.equal(whole(x))


def test_rows_say_what_is_emulated_and_predicted() -> None:
    """The search keeps to the memory of interleaved 1F1B; each ratio is that of its times."""
    compared = compare(SMALL, SMALL.units())
    found, usual = compared.searched, compared.usual
    assert (usual.schedule, len(usual.layout.starts)) == ("interleaved", 2 * RANKS)
    assert found.problem.ranks == RANKS
    assert max(found.peak_bytes) <= usual.peak_bytes
    assert found.step.step_ns < usual.length_ns
    ms = 1_000_000
    times = {
        "searched": [100 * ms, 110 * ms],
        "interleaved": [150 * ms, 165 * ms],
        "best fixed": [120 * ms, 132 * ms],
        "torch interleaved": [200 * ms, 220 * ms],
    }
    ours = ("searched", "interleaved", "best fixed")
    recorded = {name: [100 * ms, 110 * ms] for name in ours}
    predicted = {name: [90 * ms, 99 * ms] for name in ours}
    rows = rows_of(SMALL, compared, {"times": times, "measured": recorded, "predicted": predicted})
    assert all(EMULATED in row.case for row in rows)
    assert [row.metric for row in rows] == [
        "speedup_vs_interleaved",
        "speedup_vs_pytorch_interleaved",
        f"speedup_vs_balanced_{compared.best.schedule}",
        *(3 * ["predicted_over_measured", "searched_over_measured"]),
    ]
    assert [row.ratio for row in rows[:3]] == pytest.approx([1.5, 2.0, 1.2])
    assert [rows[k].ratio for k in (3, 5, 7)] == pytest.approx([0.9, 0.9, 0.9])
    known = rows[4]
    assert (known.ours, known.baseline) == (found.step.step_ns / ms, 105)
    assert known.spread == pytest.approx(
        (found.step.step_ns / ms / 110, found.step.step_ns / ms / 100)
    )
