"""The bench of searched pipelines without its ranks: the model is the one that the costs describe,
and rows say what was emulated."""

import pytest
import torch

from interlace.bench.searched import (
    EMULATED,
    RANKS,
    UnevenSize,
    best_fixed,
    rows_of,
    searched_for,
)
from interlace.bench.searched_world import UnevenGpt
from interlace.report.searched_build import usual_of

SMALL = UnevenSize(blocks=14, micro_batches=4)


def test_units_are_the_matmuls_of_the_model() -> None:
    """Weights of each unit's matmuls times two FLOPs a token, at the emulated rate; the head takes
    as long as three and a half blocks, as 128,256 words do at a width of 3072."""
    model = UnevenGpt(SMALL)
    words, *blocks, head = SMALL.units()
    assert (words.forward_ns, len(blocks)) == (0, SMALL.blocks)
    for number, unit in enumerate(blocks):
        block = model.get_submodule(unit.name)
        weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
        assert unit.forward_ns == round(2 * SMALL.tokens * weights / SMALL.flops_per_s * 1e9)
        assert (unit.forward_ns > blocks[0].forward_ns) == (number % 6 == 5)
    assert head.forward_ns / blocks[0].forward_ns == pytest.approx(
        2 * 3072 * 128_256 / (2 * 12 * 3072**2), rel=0.01
    )


def test_chunks_are_parts_of_one_model() -> None:
    """Run one after the other they are the whole, bit by bit."""
    whole = UnevenGpt(SMALL)
    x = value = torch.randint(SMALL.words, (1, 8), generator=torch.Generator().manual_seed(3))
    for first, last in ((0, 5), (5, 6), (6, SMALL.blocks + 2)):
        value = UnevenGpt(SMALL, first, last)(value)
    assert value.equal(whole(x))


def test_rows_say_what_is_emulated_and_predicted() -> None:
    """The search keeps to the memory of interleaved 1F1B; each ratio is that of its times."""
    found = searched_for(SMALL)
    usual = usual_of(found.fixed)
    assert usual.schedule == "interleaved"
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
    rows = rows_of(SMALL, found, {"times": times, "measured": recorded, "predicted": predicted})
    assert all(EMULATED in row.case for row in rows)
    assert [row.metric for row in rows] == [
        "speedup_vs_interleaved",
        "speedup_vs_pytorch_interleaved",
        f"speedup_vs_balanced_{best_fixed(found).schedule}",
        *(3 * ["predicted_over_measured", "searched_over_measured"]),
    ]
    assert [row.ratio for row in rows[:3]] == pytest.approx([1.5, 2.0, 1.2])
    assert [rows[k].ratio for k in (3, 5, 7)] == pytest.approx([0.9, 0.9, 0.9])
    known = rows[4]
    assert (known.ours, known.baseline) == (found.step.step_ns / ms, 105)
    assert known.spread == pytest.approx(
        (found.step.step_ns / ms / 110, found.step.step_ns / ms / 100)
    )
