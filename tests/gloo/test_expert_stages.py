"""Experts that are dealt to the ranks of the stages of a pipeline, in float64: losses and gradients
of every parameter against one process, as `interlace train` opens and runs the steps."""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mixture_models import EXPERTS, MixtureLoss, furthest, gradients_of
from processes import gloo_group, run_ranks
from torch import Tensor
from training import Workplace

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.errors import InputError
from interlace.experts.between_ranks import COUNTS, host_counts
from interlace.experts.grouped import MATMUL, grouped_matmul
from interlace.experts.rows_by_expert import expert_order, rows_of_tokens, tokens_of_rows
from interlace.models import model_file
from interlace.runtime.chunks import Placement, chunked
from interlace.runtime.traced_strands import build_strands
from interlace.train import opening
from interlace.train.built_model import NextTokenLoss, build_module
from interlace.train.opening import open_session
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.rank_job import job_of_rank
from interlace.train.same_run import check_built
from interlace.train.session import Session

pytestmark = pytest.mark.gloo
BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""
AFTER = 1e-6
"""Largest difference of a loss when AdamW has stepped: norms are rounded to float32 on the way."""
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
CASES: dict[int, list[tuple[str, Layout]]] = {
    4: [
        ("one_f_one_b", REPLICAS),
        ("folded", REPLICAS),
        ("zb_v", REPLICAS),
        ("zb_h1", {"parallel.data_shard": 2, "train.recompute": "layer", **BALANCED}),
        ("one_f_one_b", {"parallel.context": 2, "parallel.data_shard": 1}),
        ("one_f_one_b", {"parallel.data_shard": 2, "parallel.zero": 1}),
        ("one_f_one_b", {"parallel.data_shard": 2, "parallel.expert": 1}),
        ("one_f_one_b", {"parallel.data_shard": 2, "parallel.expert": 1, "parallel.zero": 1}),
    ],
    8: [
        ("one_f_one_b", EIGHT),
        ("one_f_one_b", {"parallel.data_shard": 4}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.zero": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.zero": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.expert": 1}),
        ("one_f_one_b", {**EIGHT, "parallel.expert": 1, "parallel.zero": 1}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.expert": 4}),
        ("one_f_one_b", {"parallel.data_shard": 4, "parallel.expert": 4, "parallel.zero": 1}),
    ],
}
if os.environ.get("INTERLACE_EXPERTS") == "all":
    CASES[16] = [("one_f_one_b", SIXTEEN), ("one_f_one_b", {**SIXTEEN, "parallel.zero": 1})]
"""By ranks. With `data_shard` 4 and two ranks for experts each expert is on two ranks of a stage,
cut between them. 16 ranks take minutes on two cores: INTERLACE_EXPERTS=all."""


def _doubled(*args: Any) -> torch.nn.Module:
    return build_module(*args).double()


class Reference(NamedTuple):
    """One process: all experts on all tokens, by plain autograd."""

    losses: list[list[Tensor]]
    """By data rank."""
    plain: list[list[Tensor]]
    """The same without an auxiliary loss."""
    gradients: dict[str, Tensor]
    after: list[list[Tensor]]
    """Losses of the same micro-batches when the optimizer has stepped."""


def _reference(session: Session) -> Reference:
    config, ranks = session.config, session.meshes.data_ranks
    torch.manual_seed(config.train.seed)
    build = model_file("moe").build
    model = build(config.model, session.dataset.vocab_size, config.data.sequence_length)
    module = NextTokenLoss(model, config.model.experts.auxiliary_weight).double()
    count = config.train.micro_batches

    def run() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        losses, plain = [], []
        for rank in range(ranks):
            batches = session.dataset.batches(1, 0, shard=rank, num_shards=ranks)
            found = [module(*next(batches))[:2] for _ in range(count)]
            (sum(loss for loss, _ in found) / (count * ranks)).backward()
            losses.append([loss.detach() for loss, _ in found])
            plain.append([cross_entropy for _, cross_entropy in found])
        return losses, plain

    losses, plain = run()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    optimizer = build_optimizer(list(module.parameters()), config.optimizer)
    build_schedule(optimizer, config.optimizer, config.train.steps)
    torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_norm)
    optimizer.step()
    return Reference(losses, plain, gradients, run()[0])


def _case(config: RunConfig) -> dict[str, Any]:
    with patch.object(opening, "build_module", _doubled):
        session = open_session(job_of_rank(config))
    check_built(session)
    batches = session.batches()
    mine = [session.move(next(batches)) for _ in range(config.train.micro_batches)]
    session.runner(mine)
    found, losses = gradients_of(session.weights), torch.stack(session.runner.losses)
    evaluated = torch.stack(session.evaluate(mine))
    session.update(1)
    session.runner(mine)
    after = torch.stack(session.runner.losses)
    wanted, place = _reference(session), session.meshes.data_rank
    off = losses - torch.stack(wanted.losses[place]), evaluated - torch.stack(wanted.plain[place])
    off_after = after - torch.stack(wanted.after[place])
    # Ranks that share sequences see a part of each, and have a loss of their own.
    whole = config.parallel.context == 1
    return {
        "loss": float(torch.stack(off).abs().max()) if whole else 0.0,
        "after": float(off_after.abs().max()) if whole else 0.0,
        "fell": float((losses - after).mean()),
        "gradients": furthest(found, {name: wanted.gradients[name] for name in found}),
        "bits": {name: hash_of(each) for name, each in found.items()},
        "all": sorted(wanted.gradients),
    }


def hash_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def child_cases(folder: str, ranks: int) -> list[dict[str, Any]]:
    os.chdir(folder)
    found = []
    with gloo_group(10 * ranks):  # the last of many ranks on two cores comes late
        for schedule, layout in CASES[ranks]:
            settings = SETTINGS | layout | {"pipeline.schedule": schedule}
            given = {key: str(value) for key, value in settings.items()}
            found.append(_case(load_run_config("run.toml", given)))
        dist.barrier()
    return found


@pytest.mark.parametrize("ranks", list(CASES))
def test_gradients_are_those_of_one_process(tmp_path: Path, ranks: int) -> None:
    """1F1B, folded stages whose passes are two strands, and zero bubbles, all with the same bits;
    and ZeRO-3, an auxiliary loss beside layers computed again, and shared sequences."""
    work = Workplace(tmp_path)
    results = run_ranks(
        "test_expert_stages:child_cases", ranks, args=[str(work.folder), ranks],
        timeout_s=50 * ranks,
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    bits: dict[tuple[str, str], set[str]] = {}
    for number, (schedule, layout) in enumerate(CASES[ranks]):
        found = [result.value[number] for result in results]
        for each in found:
            assert each["loss"] < BOUND, (schedule, layout, each)
            assert each["gradients"] < BOUND, (schedule, layout, each)
            assert each["after"] < AFTER < each["fell"], (schedule, layout, each)
            for name, digest in each["bits"].items():
                bits.setdefault((str(layout), name), set()).add(digest)
        assert {name for each in found for name in each["bits"]} == set(found[0]["all"])
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
