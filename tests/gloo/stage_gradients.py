"""Losses and gradients of stages in float64 against one process, as `interlace train` opens and
runs the steps: children of tests that give a run file and settings."""

import hashlib
import os
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from mixture_models import furthest, gradients_of
from processes import gloo_group
from torch import Tensor

from interlace.cli.run_file import load_run_config
from interlace.config import RunConfig
from interlace.models import model_file
from interlace.train import opening
from interlace.train.built_model import NextTokenLoss, build_module
from interlace.train.opening import open_session
from interlace.train.optimizer import build_optimizer, build_schedule
from interlace.train.rank_job import job_of_rank
from interlace.train.same_run import check_built
from interlace.train.session import Session

BOUND = 1e-10
"""Largest difference of a float64 gradient, relative to the largest element of its parameter."""
NOTHING = 1e-12
"""A gradient that is smaller, relative to the largest of the model, is 0 up to rounding, as that of
the bias of keys, which softmax takes out again. It is compared relative to the largest."""
AFTER = 1e-6
"""Largest difference of a loss when AdamW has stepped: norms are rounded to float32 on the way."""


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
    build = model_file(config.model.architecture).build
    model = build(config.model, session.dataset.vocab_size, config.data.sequence_length)
    module = NextTokenLoss(model, config.model.experts.auxiliary_weight).double()
    count, size = config.train.micro_batches, config.train.micro_batch_size

    def of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = module(*batch)
        return (found[0], found[1]) if isinstance(found, tuple) else (found, found.detach())

    def run() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        losses, plain = [], []
        for rank in range(ranks):
            batches = session.dataset.batches(size, 0, shard=rank, num_shards=ranks)
            found = [of(next(batches)) for _ in range(count)]
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
    config = session.config  # of stages with layouts of their own that of this rank's
    check_built(session)
    batches = session.batches()
    mine = [session.move(next(batches)) for _ in range(config.train.micro_batches)]
    session.runner(mine)
    found, losses = gradients_of(session.weights), torch.stack(session.runner.losses)
    evaluated = torch.stack(session.evaluate(mine))
    session.update(1)
    session.runner(mine)
    after = torch.stack(session.runner.losses)
    wanted = _reference(session)

    def off(own: Tensor, of_ranks: list[list[Tensor]]) -> float:
        every = torch.stack([torch.stack(each) for each in of_ranks])
        stages = session.meshes.stages
        if stages is not None and stages.apart:  # all ranks are told the mean over a micro-batch
            return float((own - every.mean(0)).abs().max())
        return float((own - every[session.meshes.data_rank]).abs().max())

    # Ranks that share sequences see a part of each, and have a loss of their own.
    whole = config.parallel.context == 1
    of_step = max(off(losses, wanted.losses), off(evaluated, wanted.plain))
    return {
        "loss": of_step if whole else 0.0,
        "after": off(after, wanted.after) if whole else 0.0,
        "fell": float((losses - after).mean()),
        "gradients": furthest(*_visible(found, wanted.gradients)),
        "nothing": _nothing(found, wanted.gradients),
        "bits": {name: hash_of(each) for name, each in found.items()},
        "all": sorted(wanted.gradients),
    }


def _is_nothing(name: str, wanted: dict[str, Tensor]) -> bool:
    largest = max(float(each.abs().max()) for each in wanted.values())
    return float(wanted[name].abs().max()) < NOTHING * largest


def _visible(
    found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of which more than rounding is left."""
    names = [name for name in found if not _is_nothing(name, wanted)]
    return {name: found[name] for name in names}, {name: wanted[name] for name in names}


def _nothing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """What the others are, relative to the largest gradient."""
    largest = max(float(each.abs().max()) for each in wanted.values())
    names = [name for name in found if _is_nothing(name, wanted)]
    return {name: float(found[name].abs().max()) / largest for name in names}


def hash_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def child(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What this rank found, by case of settings."""
    os.chdir(folder)
    found = []
    with gloo_group(10 * int(os.environ["WORLD_SIZE"])):  # the last of many ranks comes late
        for settings in cases:
            given = {key: str(value) for key, value in settings.items()}
            found.append(_case(load_run_config("run.toml", given)))
        dist.barrier()
    return found


def check(of_ranks: list[dict[str, Any]], case: Any) -> None:
    """Losses and gradients of one case are those of one process, and all parameters have one."""
    for each in of_ranks:
        assert each["loss"] < BOUND, (case, each)
        assert each["gradients"] < BOUND, (case, each)
        assert all(name.endswith("key.bias") for name in each["nothing"]), (case, each["nothing"])
        assert all(size < NOTHING for size in each["nothing"].values()), (case, each["nothing"])
        assert each["after"] < AFTER < each["fell"], (case, each)
    assert {name for each in of_ranks for name in each["bits"]} == set(of_ranks[0]["all"]), case
