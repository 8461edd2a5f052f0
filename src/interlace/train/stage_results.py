"""What a model says beside its loss, where its layers are dealt to the stages of a pipeline: the
ranks of the last chunk have it, and tell the others."""

import torch
from torch import Tensor

from interlace.graphs.parts import RESULT
from interlace.runtime.traced_strands import FORWARD
from interlace.step import Step


def gives_results(step: Step) -> bool:
    """Whether the model says something beside its loss; alike on all ranks."""
    return any(name.role == RESULT for name in step.strands.measured.parts[FORWARD].names)


def from_last_stage(step: Step, own: Tensor | None, like: Tensor, what: str) -> Tensor:
    """What the ranks of the last chunk have, alike, as `own`, on all ranks of the pipeline; `like`
    has its shape and type, and `what` is for errors. Collective over the pipeline."""
    assert step.link is not None
    assert step.strands.handovers is not None
    found = torch.zeros_like(like) if own is None else own.clone()
    step.link.share(found, step.strands.handovers.rank_of[-1], what)
    return found


def averaged_losses(step: Step, losses: Tensor, place: int) -> Tensor:
    """By micro-batch, the loss that the model gives as its result number `place`, in the place of
    `losses`, as these are told. Collective over the pipeline."""
    assert step.link is not None
    own = None
    if step.results:
        own = step.link.averaged(torch.stack([each[place] for each in step.results]))
    return from_last_stage(step, own, losses, "the losses of an evaluation")
