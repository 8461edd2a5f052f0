"""What the passes and messages of a step of a pipeline cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interlace.ir.actions import Action, Direction, Share, Slot
from interlace.ir.stage_messages import Edge, StageMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCosts:
    """What the passes of one chunk cost for one micro-batch."""

    forward_ns: int
    input_ns: int
    """Gradients of inputs."""
    weight_ns: int
    """Gradients of weights; a whole backward takes both."""
    saved_bytes: int = 0
    """What a forward keeps for its backward."""
    kept_bytes: int = 0
    """What of it, and of what the gradients of inputs made, the gradients of weights need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What a step costs. Times of pairs and messages that are not given: the sum of both passes,
    and nothing."""

    chunks: Sequence[ChunkCosts]
    pairs_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase (`forward_0+backward_1`): the time of passes side by side."""
    messages_ns: Mapping[Edge, int] = field(default_factory=dict)
    """By edge: how long its tensors take from rank to rank, and their gradients back."""
    between_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase: how long its rank is busy behind it, handing over what was made and asking for what
    comes; nothing by default."""
    edges: tuple[Edge, ...] | None = None
    """Which chunk reads which; by default each the one before."""
    before_ns: tuple[int, ...] = ()
    """By rank: from the start of the step to its first action; nothing by default."""
    behind_ns: int = 0
    """From the end of the last action of all ranks to that of the step."""

    def action_ns(self, action: Action) -> int:
        """How long an action takes."""
        alone = sum(self._pass_ns(slot) for slot in action.slots)
        return self.pairs_ns.get(action.phase, alone) if len(action.slots) > 1 else alone

    def message_ns(self, message: StageMessage) -> int:
        """How long a message takes."""
        forward = message.direction == Direction.FORWARD
        edge = (message.source, message.to) if forward else (message.to, message.source)
        return self.messages_ns.get(edge, 0)

    def _pass_ns(self, slot: Slot) -> int:
        chunk = self.chunks[slot.strand.chunk or 0]
        if slot.strand.direction == Direction.FORWARD:
            return chunk.forward_ns
        first = chunk.input_ns if slot.strand.share != Share.WEIGHT else 0
        return first + (chunk.weight_ns if slot.strand.share != Share.INPUT else 0)
