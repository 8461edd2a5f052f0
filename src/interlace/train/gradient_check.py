"""`train --check`: one compiled step against eager PyTorch, before training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from interlace.errors import InputError, RunError
from interlace.parallel.local_parts import local
from interlace.ranks.small_collectives import gather_json
from interlace.runtime.eager_check import StepComparison, comparison_of, timed
from interlace.runtime.executor import Batch
from interlace.train.session import Session
from interlace.train.step_runners import StepRunner

BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2}
"""By `train.dtype`, how far a gradient may be off, over the largest one of the model, and a loss
over itself: a hundred times what other orders of addition make in float32, and five times the 1 %
of eager PyTorch in bfloat16, which rounds sums of gradients after each micro-batch."""
REPEATS = 3
"""Steps of both ways that are timed, in turn; a choice."""


def check_gradients(session: Session, batches: Sequence[Batch]) -> tuple[str, dict[str, Any]]:
    """Run `batches` by eager PyTorch and by the step that the run trains with: (a text for people,
    values for metrics.jsonl). Weights stay as they are; gradients are overwritten. Collective.

    Raises InputError on all ranks for steps that draw random numbers, and RunError on all ranks,
    naming the worst gradient and its rank, if losses or gradients are further apart than `BOUNDS`.
    """
    if session.main is not None and session.main.strands.takes_seeds:
        raise InputError(
            "the step draws random numbers, as for dropout, and eager PyTorch draws others",
            hint="check once without dropout in the model's configuration, or leave --check out",
        )
    found = _compared(session, batches)
    rows = gather_json(_verdict(found), None)
    rank = max(range(len(rows)), key=lambda each: _order(rows[each]["gradient_off"]))
    losses = max(_order(row["loss_off"]) for row in rows)
    bound = BOUNDS[session.config.train.dtype]
    missing = sorted({name for row in rows for name in row["missing"]})
    worst, off = rows[rank]["gradient"], _order(rows[rank]["gradient_off"])
    if missing or off > bound or losses > bound:
        raise RunError(
            f"the compiled step is not eager PyTorch's: losses are off by {losses:.2g}, and the "
            f"gradient of {worst!r} on rank {rank} by {off:.2g} of the largest gradient; the bound "
            f"is {bound:g}" + (f"; by one way only: {', '.join(missing)}" if missing else ""),
            hint='train with strands = "eager", and report this with the run file',
        )
    values = {"losses_off": losses, "gradients_off": off, "worst_gradient": worst, "bound": bound}
    values |= {"eager_ms": [each / 1e6 for each in found.eager_ns]}
    values |= {"step_ms": [each / 1e6 for each in found.step_ns]}
    said = f"gradients of all ranks are within {off:.2g} of the largest one (bound {bound:g})"
    return f"checked against eager PyTorch, rank 0:\n{found.summary()}\n{said}", values


def _compared(session: Session, batches: Sequence[Batch]) -> StepComparison:
    eager, step = session.runners["eager"], session.runner
    theirs, wanted = _ran(session, eager, batches)
    mine, found = _ran(session, step, batches)
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(REPEATS):
        times[0].append(timed(lambda: eager(batches), batches))
        times[1].append(timed(lambda: step(batches), batches))
    return comparison_of(list(zip(theirs, mine, strict=True)), wanted, found, times)


def _ran(
    session: Session, runner: StepRunner, batches: Sequence[Batch]
) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses, and copies of this rank's parts of gradients by name."""
    for parameter in session.weights.parameters:
        parameter.grad = None
    runner(batches)
    gradients = {
        name: local(master.grad).clone()
        for name, master in session.weights.masters.items()
        if master.grad is not None
    }
    return [float(each) for each in runner.losses], gradients


def _verdict(found: StepComparison) -> dict[str, Any]:
    """How far off a rank is. A nan is written as None, as JSON has none."""
    largest = max((each.largest for each in found.gradients), default=0.0) or 1.0
    worst = max(found.gradients, key=lambda each: _order(each.difference), default=None)
    off = max(abs(one - other) / (abs(one) or 1.0) for one, other in found.losses)
    gradient_off = worst.difference / largest if worst is not None else 0.0
    return {
        "loss_off": off if math.isfinite(off) else None,
        "gradient": worst.name if worst is not None else "",
        "gradient_off": gradient_off if math.isfinite(gradient_off) else None,
        "missing": found.missing,
    }


def _order(off: float | None) -> float:
    """What was not finite is the worst."""
    return math.inf if off is None or not math.isfinite(off) else off
