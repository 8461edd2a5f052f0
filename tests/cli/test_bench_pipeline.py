"""The bench of pipelines without its ranks: which rows it has, and what each ratio is of."""

from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining as theirs

from interlace.bench.pipeline import _SCHEDULES, rows_of
from interlace.schedules.finder import find
from interlace.schedules.torch_csv import to_csv


def test_every_schedule_has_its_rows() -> None:
    """Times and memory against PyTorch's, and time, bubble and memory against the simulator."""
    names = [f"ours {ours}" for ours, _, _ in _SCHEDULES]
    rivals = [f"torch {theirs}" for _, theirs, _ in _SCHEDULES if theirs]
    own = [ours for ours, _, _ in _SCHEDULES]
    found = {
        "times": {name: [100e6, 110e6] for name in names} | {r: [150e6, 165e6] for r in rivals},
        "peak": {name: [2.0**21] for name in names} | {rival: [2.0**22] for rival in rivals},
        "predicted": {name: [95e6, 105e6] for name in own},
        "measured": {name: [100e6, 100e6] for name in own},
        "recorded": {name: [95e6, 105e6] for name in own},
        "bubble_predicted": {name: [0.1] for name in own},
        "bubble_measured": {name: [0.2] for name in own},
        "peak_predicted": {name: [2.0**20] for name in own},
    }
    rows = {(row.case, row.metric): row for row in rows_of("a link", found)}
    assert len(rows) == 6 * len(own) + 2 * len(rivals)
    ratio = {metric: rows["zb_h1, a link", metric].ratio for _, metric in rows}
    assert ratio == pytest.approx(
        {
            "speedup_vs_pytorch": 1.5,
            "speedup_vs_1f1b": 1.5,
            "memory_vs_pytorch": 2.0,
            "memory_vs_1f1b": 2.0,
            "predicted_over_measured": 1.0,
            "predicted_over_recorded": 1.0,
            "bubble_predicted_over_measured": 0.5,
            "memory_predicted_over_measured": 0.5,
        }
    )
    assert (row := rows["zb_h1, a link", "bubble_predicted_over_measured"]).ours == 10
    assert row.baseline == 20
    assert ("folded, a link", "speedup_vs_pytorch") not in rows


@pytest.mark.parametrize(("ours", "rival", "chunks"), _SCHEDULES)
def test_schedules_exist_on_both_sides(ours: str, rival: str, chunks: int) -> None:
    """With so many chunks on each of two ranks."""
    del chunks
    assert find(ours).name == ours
    assert not rival or hasattr(theirs, f"Schedule{rival}")


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (3, 12), (4, 8), (8, 32)])
def test_the_rival_of_zb_h1_has_its_order(ranks: int, count: int) -> None:
    """PyTorch's interleaved zero bubble with one stage on a rank."""
    stage = MagicMock(group_size=ranks, group_rank=0, num_stages=ranks, stage_index=0)
    order = theirs.ScheduleInterleavedZeroBubble([stage], count, None).pipeline_order
    lists = [",".join(str(each) for each in order[r] if each is not None) for r in range(ranks)]
    assert lists == to_csv(find("zb_h1").of_ranks(ranks, count)).split()
