"""The bench of stages without its ranks: where messages stand for those that wait for each, the
paper's shares of communication, and what rows say."""

import pytest
import torch

from interlace.bench.decompose_emulated import emulated_compute
from interlace.bench.searched import EMULATED
from interlace.bench.stage_transfers import (
    BLOCKING,
    OURS,
    PAPER,
    SEARCHED,
    SIGNAL,
    TORCH,
    WAYS,
    rows_of,
    run,
)
from interlace.bench.stage_transfers_cases import FULL, GPT_1B3, QUICK, U_TRANSFORMER_1B, StageCase
from interlace.bench.stage_transfers_links import by_the_clock
from interlace.errors import InputError
from interlace.ir.stage_messages import chain
from interlace.models.u_transformer import UTransformer, preset
from interlace.schedules.finder import find
from interlace.schedules.sends_receives import check_messages, without_messages

MS = 1_000_000


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16])
def test_by_the_clock_nobody_waits_for_ever(count: int) -> None:
    """With no message under way at a time; actions stay as they are."""
    actions = find("one_f_one_b").of_ranks(2, count)
    lists = by_the_clock(actions, chain(2))
    check_messages(lists, edges=chain(2), name="one_f_one_b")
    assert without_messages(lists) == actions


def test_a_blocking_rank_exchanges_between_its_turns() -> None:
    """In the middle of 1F1B a stage has run a forward and a backward since its last exchange, and
    so has the other: none waits for more than the transfers."""
    second = by_the_clock(find("one_f_one_b").of_ranks(2, 5), chain(2))[1]
    text = [str(item) for item in second]
    middle = text.index("forward_1 3")
    assert text[middle - 2 : middle + 4] == [
        "receive forward_0>1 3 from rank 0",
        "send backward_1>0 2 to rank 0",
        "forward_1 3",
        "backward_1 3",
        "receive forward_0>1 4 from rank 0",
        "send backward_1>0 3 to rank 0",
    ]


def test_shares_are_those_of_the_papers_machines() -> None:
    """As the docstring derives them; the values that cross are those of our preset."""
    assert GPT_1B3.share == pytest.approx(0.0537 / 0.757, rel=5e-3)
    assert U_TRANSFORMER_1B.share == pytest.approx(0.377 / 1.313, rel=1e-2)
    crossing: list[torch.Tensor] = []
    with torch.device("meta"):
        model = UTransformer(preset("1b"))
        model.up[2].register_forward_pre_hook(lambda _, args: crossing.extend([args[0], *args[1]]))
        model.up[3].register_forward_pre_hook(lambda _, args: crossing.extend(args[1]))
        model(torch.empty(1, 3, 32, 32), torch.empty(1))
    values = sum(each.numel() for each in crossing)
    assert U_TRANSFORMER_1B.boundary_bytes == 64 * 4 * values


def test_pretended_convolutions_have_the_shapes_of_real_ones() -> None:
    """Forward and backward, with strides, and without a gradient of the input."""
    aten = torch.ops.aten
    x, weight, bias = torch.ones(2, 3, 9, 8), torch.ones(5, 3, 3, 3), torch.ones(5)
    where = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    real = aten.convolution(x, weight, bias, *where)
    backward = (torch.ones_like(real), x, weight, [5], *where, [False, True, True])
    gradients = aten.convolution_backward(*backward)
    with emulated_compute(1e15):
        pretended = aten.convolution(x, weight, bias, *where)
        zeros = aten.convolution_backward(*backward)
    assert pretended.shape == real.shape
    assert not pretended.any()
    assert [None if z is None else z.shape for z in zeros] == [
        None if g is None else g.shape for g in gradients
    ]


def test_no_bench_inside_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLACE_LAB_DEVICE", "eth0")
    with pytest.raises(InputError) as refusal:
        run(quick=True, json_path=None)
    assert "no network namespaces here" in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize("part", ["gtp", "u_transformer"])
def test_parts_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A wrong word, and a model of which there is no quick case."""
    monkeypatch.setattr("interlace.lab.hosts.available", str)
    monkeypatch.setattr("interlace.lab.hosts.inside_lab", bool)
    with pytest.raises(InputError) as refusal:
        run(quick=True, json_path=None, part=part)
    assert part in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize("case", [FULL[0], *QUICK])
def test_rows_say_what_is_emulated(case: StageCase) -> None:
    """Each ratio is that of its times, and the share of communication is set against the
    paper's."""
    times = {name: [100 * MS, 110 * MS] for name in (*(way[0] for way in WAYS), SEARCHED)}
    times[BLOCKING] = [150 * MS, 165 * MS]
    for name in (PAPER, OURS, SEARCHED):
        times[SIGNAL + name] = [95 * MS, 105 * MS]
    if case.is_tensor_parallel:
        times[TORCH] = [120 * MS, 132 * MS]
    found = {
        "times": times,
        "predicted": {name: [90 * MS] for name in (PAPER, OURS, SEARCHED)},
        "measured": {name: [100 * MS] for name in (PAPER, OURS, SEARCHED)},
        "crossing_ns": case.share * 10 * MS,
        "pass_ns": [10 * MS, 12 * MS],
    }
    rows = rows_of(case, found)
    assert all(EMULATED in row.case for row in rows)
    assert all("GPT" in row.case for row in rows)
    label = f"{case.name}, {EMULATED}"
    ratio = {(row.case.removesuffix(f", {label}"), row.metric): row.ratio for row in rows}
    assert ratio[label, "boundary_over_compute"] == pytest.approx((1 + 10 / 12) / 2)
    assert ratio[OURS, "speedup_vs_blocking"] == pytest.approx(1.5)
    assert ratio[PAPER, "of_signal_bound"] == pytest.approx((95 / 100 + 105 / 110) / 2)
    assert ratio[OURS, "predicted_over_measured"] == pytest.approx(0.9)
    assert ratio[SEARCHED, "of_signal_bound"] == ratio[PAPER, "of_signal_bound"]
    assert ((TORCH, "speedup_vs_blocking") in ratio) is case.is_tensor_parallel
