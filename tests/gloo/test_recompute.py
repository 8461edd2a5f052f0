"""Proves that recomputation changes memory and no bit, with one strand and with two, with dropout
and without; and that gradients of bfloat16 micro-batches are summed in float32.

Wide is one rank, whose graphs are those of two without the collectives.
"""

import re
from typing import Any

import pytest
import torch
from processes import gloo_group, run_ranks
from recompute_world import Case, Family, counts, open_case
from strand_world import differences
from torch import Tensor, nn
from traced_once import traced_once

from interlace.errors import InputError
from interlace.graphs.module_paths import blocks_of
from interlace.graphs.recompute import RecomputePolicy, with_recompute
from interlace.graphs.remake import AGAIN, kept_bytes
from interlace.graphs.trace import trace_chunk
from wide import WIDE

FAMILIES = {
    "1": {"grouped queries": Family(kv_heads=2)},
    "2": {
        "llama": Family(dtype=torch.bfloat16),
        "gpt with dropout": Family(architecture="gpt", dropout=0.2),
    },
}
NAMES = {
    "attention": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "attention backward": "flash_attention_for_cpu_backward",
    "matmuls": "mm",
    "gathers": "all_gather",
    "sums": "reduce",
    "dropout": "interlace.dropout",
}
LAYERS = 2


def child(ranks: int) -> dict[str, Any]:
    with gloo_group():
        return {name: facts(family, ranks) for name, family in FAMILIES[str(ranks)].items()}


def facts(family: Family, ranks: int) -> dict[str, Any]:
    """Per policy: bytes kept, operators of the backward, and which bits differ from `none`."""
    with traced_once():
        return _facts(family, ranks)


def _facts(family: Family, ranks: int) -> dict[str, Any]:
    plain = open_case(family, ranks=ranks)
    truth = plain.run(plain.strands.sequential)
    cases: dict[str, Case] = {"none": plain}
    for mode in ("attention", "layer"):
        cases[mode] = open_case(family, mode, ranks=ranks)  # type: ignore[arg-type]
    budget = (plain.kept_bytes + cases["layer"].kept_bytes) // 2
    if not family.dropout:
        cases["budget"] = open_case(family, "budget", budget, ranks=ranks)
    return {
        mode: {
            "kept": case.kept_bytes,
            "allowed": budget,
            "counts": counts(case.strands, NAMES),
            "one strand": differences(truth, case.run(case.strands.sequential)),
            "two strands": differences(truth, case.run(case.planned())),
            "names": len(truth[0]),
            "learns": truth[0] != truth[1],
        }
        for mode, case in cases.items()
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=WIDE, id="one rank"), pytest.param(2, id="two ranks")],
)
def found(request: pytest.FixtureRequest) -> list[Any]:
    """Facts of every rank and family: by policy."""
    results = run_ranks("test_recompute:child", request.param, args=[request.param], timeout_s=240)
    return [facts for result in results for facts in result.value.values()]


def test_no_policy_changes_a_bit(found: list[Any]) -> None:
    """Losses and gradients of two steps: every policy, one strand and two, has the bits of one
    strand that keeps everything."""
    assert any("budget" in family for family in found)
    for family in found:
        for row in family.values():
            assert row["names"] > 20
            assert row["learns"]
            assert row["one strand"] == []
            assert row["two strands"] == []


def test_less_is_kept(found: list[Any]) -> None:
    """Bytes kept per micro-batch, from the planner's graph: attention < none, layer < half of
    none, and a budget is kept to."""
    for family in found:
        kept = {mode: row["kept"] for mode, row in family.items()}
        assert kept["attention"] < kept["none"]
        assert kept["layer"] < kept["none"] / 2
        assert kept.get("budget", 0) <= family["none"]["allowed"]


def test_what_is_computed_again(found: list[Any]) -> None:
    """`attention` runs each attention once more and nothing heavy else; `layer` also the matmuls
    and gathers of the blocks; neither repeats a sum over ranks."""
    for family in found:
        row = {mode: family[mode]["counts"] for mode in ("none", "attention", "layer")}
        assert row["none"]["attention"] == row["none"]["dropout"] == 0
        for mode in ("attention", "layer"):
            assert row[mode]["attention"] == LAYERS
            assert row[mode]["attention backward"] == LAYERS
            assert row[mode]["sums"] == row["none"]["sums"]
        assert row["attention"]["matmuls"] == row["none"]["matmuls"]
        assert row["attention"]["gathers"] == row["none"]["gathers"]
        assert row["attention"]["dropout"] == 0
        assert row["layer"]["matmuls"] > row["none"]["matmuls"]
        if row["none"]["gathers"]:
            assert row["layer"]["gathers"] == row["none"]["gathers"] + 2 * LAYERS


def test_gradients_of_many_micro_batches_are_summed_in_float32() -> None:
    """With bfloat16 compute the sum over 32 micro-batches is, bit for bit, a float32 sum of their
    bfloat16 gradients, with one strand and with two, and not the bfloat16 sum."""
    (result,) = run_ranks("test_recompute:sums_child", 1, timeout_s=120)
    assert result.value["compared"] > 10
    assert result.value["one strand"] == result.value["two strands"] == []
    assert result.value["equal in bfloat16"] < result.value["compared"] / 2


def sums_child(count: int = 32) -> dict[str, Any]:
    family = Family(dtype=torch.bfloat16)
    with gloo_group():
        case = open_case(family, "layer", ranks=1)
        batches = family.batches(0, count)
        runner = case.runner(case.strands.sequential)
        wide: dict[str, Tensor] = {}
        narrow: dict[str, Tensor] = {}
        for batch in batches:
            runner([batch])
            for name, gradient in case.gradients.items():
                assert torch.equal(gradient.bfloat16().float(), gradient)  # a bfloat16 value
                part = gradient / count  # a power of 2: exact
                wide[name] = wide.get(name, 0) + part
                narrow[name] = narrow.get(name, 0) + part.bfloat16()
        different = {}
        plans = {"one strand": case.strands.sequential, "two strands": case.planned()}
        for label, plan in plans.items():
            case.runner(plan)(batches)
            totals = case.gradients
            different[label] = [name for name in wide if not torch.equal(wide[name], totals[name])]
    rounded = sum(torch.equal(wide[name], narrow[name].float()) for name in wide)
    return {"compared": len(wide), "equal in bfloat16": rounded} | different


class Plain(nn.Module):
    """A list of one-matmul layers: neither blocks nor attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


@pytest.mark.parametrize(("mode", "what"), [("layer", "blocks"), ("attention", "no attention")])
def test_models_without_the_part_are_refused(mode: Any, what: str) -> None:
    """What a policy would compute again must exist; the error says what was looked for."""
    chunk = trace_chunk(Plain(), (torch.ones(2, 4), torch.zeros(2, 4)))
    with pytest.raises(InputError, match=what):
        with_recompute(chunk, RecomputePolicy(mode=mode))


class Mixer(nn.Module):
    """Blocks of a model that is no transformer, inside of an outer Sequential."""

    def __init__(self, attend: bool) -> None:
        super().__init__()
        self.attend = attend
        blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.net(x)
        if self.attend:  # attention written out, as in models without the fused kernel
            scores = (x @ x.transpose(1, 2)).softmax(-1)
            x = self.net(scores @ x)
        return (x - y).square().mean()


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(3, 6, 4, generator=draw), torch.randn(3, 6, 4, generator=draw)


def test_blocks_and_written_out_attention_are_found() -> None:
    """The list with several working elements is the list of blocks, and softmax between two batched
    matmuls is attention: of both, less is kept."""
    chunk = trace_chunk(Mixer(attend=False), inputs())
    assert set(blocks_of(chunk.forward.graph).values()) == {f"net.1.{i}" for i in range(3)}
    before = kept_bytes(chunk)
    assert kept_bytes(with_recompute(chunk, RecomputePolicy(mode="layer"))) < before / 2

    chunk = trace_chunk(Mixer(attend=True), inputs())
    before = kept_bytes(chunk)
    after = with_recompute(chunk, RecomputePolicy(mode="attention"))
    targets = [str(n.target) for n in after.backward.graph.nodes if n.name.endswith(AGAIN)]
    assert any("softmax" in target for target in targets)
    assert kept_bytes(after) < before


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least() -> None:
    """The error says how much is needed at least, and that much works."""
    chunk = trace_chunk(Mixer(attend=False), inputs())
    with pytest.raises(InputError, match="too little") as refused:
        with_recompute(chunk, RecomputePolicy(mode="budget", budget_bytes=1024))
    least = float(re.findall(r"recompute_mib to ([0-9.e-]+)", refused.value.hint)[0])
    done = with_recompute(chunk, RecomputePolicy(mode="budget", budget_bytes=int(least * 2**20)))
    assert 1024 < kept_bytes(done) <= least * 2**20
