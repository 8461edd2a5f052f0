"""Experts that are dealt to the ranks of the stages of a pipeline, in float64: losses and gradients
of every parameter against one process, as `interlace train` opens and runs the steps.

`make test` runs four layouts on four ranks, with schedules of one chunk and of two on a rank; wide
are the other schedules and layouts, and 8 and 16 ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mixture_models import EXPERTS, MixtureLoss
from processes import run_ranks
from stage_gradients import check
from torch import Tensor
from training import Workplace

from interlace.errors import InputError
from interlace.experts.between_ranks import COUNTS, host_counts
from interlace.experts.grouped import MATMUL, grouped_matmul
from interlace.experts.rows_by_expert import expert_order, rows_of_tokens, tokens_of_rows
from interlace.runtime.chunks import Placement, chunked
from interlace.runtime.traced_strands import build_strands
from wide import WIDE

pytestmark = pytest.mark.gloo
SETTINGS: dict[str, Any] = {
    "strands": "2",
    "model.architecture": "moe",
    "model.width": 32,
    "model.kv_heads": 2,
    "model.ffn_width": 24,
    "model.experts.count": 4,
    "model.experts.chosen": 2,
    "parallel.tensor": 1,
    "parallel.pipeline": 2,
    "parallel.expert": 2,
    "train.micro_batches": 4,
    "train.micro_batch_size": 1,
    "data.sequence_length": 16,
    "plan.cluster": "laptop",  # nothing is measured
}
BALANCED = {
    "model.experts.shared_width": 8,
    "model.experts.balance": "auxiliary_loss",
    "model.experts.auxiliary_weight": 0.1,
}
Layout = dict[str, Any]
REPLICAS: Layout = {"parallel.data_replicate": 2}
EIGHT: Layout = {"parallel.data_shard": 2, "parallel.tensor": 2}
SIXTEEN: Layout = {"parallel.data_shard": 4, "parallel.tensor": 2, "parallel.expert": 4}
SHARDS: Layout = {"parallel.data_shard": 2}
Case = tuple[str, Layout]
CASES: dict[str, tuple[int, list[Case]]] = {
    "4": (4, [
        ("one_f_one_b", REPLICAS),
        ("folded", REPLICAS),
        ("zb_h1", {**SHARDS, "train.recompute": "layer", **BALANCED}),
        ("one_f_one_b", {"parallel.context": 2, "parallel.data_shard": 1}),
    ]),
}  # fmt: skip
"""Number of ranks, schedules and layouts. Those of one layout must have the same bits."""
WIDE_CASES: dict[str, tuple[int, list[Case]]] = {
    "4, schedules": (4, [
        ("one_f_one_b", REPLICAS),
        ("zb_v", REPLICAS),
        ("dual_pipe_v", REPLICAS),
    ]),
    "4, shards": (4, [
        ("one_f_one_b", {**SHARDS, "parallel.zero": 1}),
        ("one_f_one_b", {**SHARDS, "parallel.expert": 1}),
        ("one_f_one_b", {**SHARDS, "parallel.expert": 1, "parallel.zero": 1}),
    ]),
    "8": (8, [
        ("one_f_one_b", EIGHT),
        ("one_f_one_b", {"parallel.data_shard": 4}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.zero": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.zero": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.expert": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.expert": 1, "parallel.zero": 1}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.expert": 4}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.expert": 4, "parallel.zero": 1}),
    ]),
    "16": (16, [("one_f_one_b", SIXTEEN), ("one_f_one_b", {**SIXTEEN, "parallel.zero": 1})]),
}  # fmt: skip
"""With `data_shard` 4 and two ranks for experts each expert is on two ranks of a stage, cut between
them."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        *(pytest.param(*value, id=name) for name, value in CASES.items()),
        *(pytest.param(*value, marks=WIDE, id=name) for name, value in WIDE_CASES.items()),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    """1F1B, folded stages whose passes are two strands, and zero bubbles, all with the same bits;
    and ZeRO-3, an auxiliary loss beside layers computed again, and shared sequences."""
    work = Workplace(tmp_path)
    settings = [SETTINGS | layout | {"pipeline.schedule": name} for name, layout in cases]
    results = run_ranks(
        "stage_gradients:child", ranks, args=[str(work.folder), settings], timeout_s=50 * ranks,
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    bits: dict[tuple[str, str], set[str]] = {}
    for number, (schedule, layout) in enumerate(cases):
        found = [result.value[number] for result in results]
        check(found, (schedule, layout))
        for each in found:
            for name, digest in each["bits"].items():
                bits.setdefault((str(layout), name), set()).add(digest)
    assert all(len(digests) == 1 for digests in bits.values()), bits


class _InTwo(torch.nn.Module):
    """A layer of experts whose activation is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.weight = torch.nn.Parameter(torch.ones(EXPERTS, 8, 8))
        self.activation = torch.nn.SiLU()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(tokens)
        order, place, sent = expert_order(targets, EXPERTS)
        counts = host_counts(sent, sent)
        rows = self.activation(rows_of_tokens(x, order, place, 1))
        return tokens_of_rows(grouped_matmul(rows, self.weight, counts, 1), order, place).mean()


def test_chunks_do_not_end_between_the_exchanges_of_a_layer() -> None:
    """Counts are on the host, and rows have the number of the routing: neither goes to a stage."""
    example = torch.randint(0, 64, (2, 5)), torch.randint(0, 64, (2, 5))
    strands = build_strands(MixtureLoss(2, 16, 64), example, {}, buffer_dtype=torch.float32)
    for chunks in range(2, 6):
        found = chunked(strands, Placement(rank_of=range(chunks)))
        crossing = {each.node.target for way in found.handovers.messages.values() for each in way}
        assert COUNTS not in crossing
        assert MATMUL not in crossing
    example = torch.randn(4, 8), torch.randint(0, EXPERTS, (4, 1))
    strands = build_strands(_InTwo(), example, {}, buffer_dtype=torch.float32)
    with pytest.raises(InputError, match="'activation', which begins between the exchanges"):
        chunked(strands, Placement(rank_of=(0, 1), split_at=("activation",)))
