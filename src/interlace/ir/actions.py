"""Actions: what one rank runs, as data. A schedule is a tuple of them for each rank.

An action names the graphs that run together and, for each, which micro-batch it works on. One
graph on one micro-batch is a slot; two slots in one action are two strands that share an issue
order. A strand is what a slot runs, without its micro-batch: a direction, the chunk of the model
if a rank has several, and the share of that pass. It has a word, which stands in plans:

    word      direction  share
    forward   forward    whole   all of a forward pass
    next      forward    head    its first operators, one action before the others
    rest      forward    rest    its other operators
    first     forward    end     all of the forward that begins a step, by a graph of its own
    gather    forward    once    what data-parallel ranks gather once a step
    backward  backward   whole   all of a backward pass
    input     backward   input   the gradients of its inputs, which the chunk before waits for
    weight    backward   weight  the gradients of its weights, which nobody waits for
    final     backward   end     all of the backward that ends a step, by a graph of its own
    reduce    backward   once    what data-parallel ranks reduce once a step

`forward_1` is the forward pass of chunk 1; where a rank has one chunk, words have no number.
A phase is the strands of an action joined by `+`, such as `rest+next+backward`. Actions of equal
phase run the same executable graph, so a plan has one order per phase.

Where the chunks of a model lie on several ranks, chunks are counted over all of them, in the order
of the forward pass, and what one hands to the next is a message: activations forward, their
gradients backward (`ir.stage_messages`). A rank sends and receives between its actions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from interlace.errors import InputError


class Direction(StrEnum):
    """Which way a strand walks through the model."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = str.__hash__  # that of enumerations is written in Python, and takes 10 times as long


class Share(StrEnum):
    """How much of a pass a strand runs."""

    WHOLE = "whole"
    HEAD = "head"
    REST = "rest"
    END = "end"
    ONCE = "once"
    INPUT = "input"
    WEIGHT = "weight"

    __hash__ = str.__hash__


_WORDS = {
    "gather": (Direction.FORWARD, Share.ONCE),
    "first": (Direction.FORWARD, Share.END),
    "forward": (Direction.FORWARD, Share.WHOLE),
    "rest": (Direction.FORWARD, Share.REST),
    "next": (Direction.FORWARD, Share.HEAD),
    "backward": (Direction.BACKWARD, Share.WHOLE),
    "input": (Direction.BACKWARD, Share.INPUT),
    "weight": (Direction.BACKWARD, Share.WEIGHT),
    "final": (Direction.BACKWARD, Share.END),
    "reduce": (Direction.BACKWARD, Share.ONCE),
}
"""In the order in which strands read and write the same memory."""
_WORD_OF = {meaning: word for word, meaning in _WORDS.items()}
"""The word of each direction and share."""
_PLACE = {meaning: place for place, meaning in enumerate(_WORDS.values())}
"""The place of each in that order."""
_TEXT = re.compile(r"([a-z]+)(?:_(\d+))?")
"""Finds the word of a strand and, behind `_`, the number of its chunk."""
_PARTS = (Share.HEAD, Share.REST)
"""Shares of a forward that was cut in two."""


@dataclass(frozen=True, slots=True)
class Strand:
    """What a slot runs: one direction of one chunk, or a share of it."""

    direction: Direction
    chunk: int | None = None
    """None where a rank has one chunk."""
    share: Share = Share.WHOLE

    @property
    def text(self) -> str:
        """The word in the name of a phase, such as `rest` or `forward_1`."""
        return self._numbered(_WORD_OF[self.direction, self.share])

    @property
    def label(self) -> str:
        """The part of operator ids before the dot: `forward.mm_3`. A rest goes by the name of the
        pass that it finishes."""
        return self._numbered(str(self.direction)) if self.share == Share.REST else self.text

    @property
    def graph(self) -> str:
        """The key of the graph that it runs, or runs a share of."""
        return self._numbered(str(self.direction)) if self.share in _PARTS else self.text

    @property
    def walk(self) -> str:
        """`forward` or `backward`, with the chunk: strands of one walk never run side by side."""
        return self._numbered(str(self.direction))

    @property
    def shown(self) -> str:
        """What timelines call it: its direction, or its word if it runs once a step."""
        return self.text if self.share == Share.ONCE else str(self.direction)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts strands as they read and write the same memory, chunk by chunk forward and the
        other way round backward."""
        chunk = self.chunk or 0
        return _PLACE[self.direction, self.share], (
            chunk if self.direction == Direction.FORWARD else -chunk
        )

    def _numbered(self, word: str) -> str:
        return word if self.chunk is None else f"{word}_{self.chunk}"


@lru_cache(maxsize=256)
def strand(text: str) -> Strand:
    """The strand with this text or label. Raises InputError for a word that is none."""
    found = _TEXT.fullmatch(text)
    if found is None or found[1] not in _WORDS:
        raise InputError(
            f"{text!r} is not the name of a strand", hint="known: " + ", ".join(_WORDS)
        )
    direction, share = _WORDS[found[1]]
    return Strand(direction, int(found[2]) if found[2] else None, share)


def strands_of(phase: str) -> tuple[Strand, ...]:
    """The strands of a phase, by its name. Raises InputError for a word that is none."""
    return tuple(strand(text) for text in phase.split("+"))


def is_phase(name: str) -> bool:
    """Whether this is the name of a phase."""
    words = [_TEXT.fullmatch(text) for text in name.split("+")]
    return all(found is not None and found[1] in _WORDS for found in words)


def phase_of(strands: Iterable[Strand]) -> str:
    """The name of the phase of these strands."""
    return "+".join(each.text for each in strands)


def steady_phase(phases: Iterable[str]) -> str:
    """The phase that most of a long step consists of: the first of those with most strands that
    are part of every micro-batch."""

    def busy(phase: str) -> int:
        return sum(each.share not in (Share.ONCE, Share.END) for each in strands_of(phase))

    return max(phases, key=busy)


def label_of(operator: str) -> str:
    """`forward` of `forward.mm_3`; empty in a graph of one strand."""
    return operator.rpartition(".")[0]


@lru_cache(maxsize=256)
def shown(label: str) -> str:
    """What timelines call a strand; a name that is no strand's stays as it is."""
    found = _TEXT.fullmatch(label)
    return strand(label).shown if found and found[1] in _WORDS else label


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Labels of strands in the order in which their graphs work in the same memory."""
    return sorted(labels, key=lambda label: strand(label).order)


def labels_of(labels: Iterable[str], direction: Direction, share: Share) -> list[str]:
    """Those of `labels` that are of this direction and share, in the order of `sorted_labels`."""
    found = [each for each in labels if (strand(each).direction, strand(each).share)
             == (direction, share)]  # fmt: skip
    return sorted_labels(found)


@dataclass(frozen=True, slots=True)
class Slot:
    """A strand on a micro-batch, which counts from 1."""

    strand: Strand
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Action:
    """Slots that run in one planned order."""

    slots: tuple[Slot, ...]

    @property
    def phase(self) -> str:
        """The name of its phase."""
        return phase_of(slot.strand for slot in self.slots)

    def __str__(self) -> str:
        """`forward 2 | backward 1`."""
        return " | ".join(f"{slot.strand.text} {slot.micro_batch}" for slot in self.slots)


def forward(micro_batch: int, chunk: int | None = None) -> Slot:
    """The forward pass of a micro-batch, through one chunk if a rank has several."""
    return Slot(Strand(Direction.FORWARD, chunk), micro_batch)


def backward(micro_batch: int, chunk: int | None = None) -> Slot:
    """The backward pass of a micro-batch, through one chunk if a rank has several."""
    return Slot(Strand(Direction.BACKWARD, chunk), micro_batch)


def input_gradient(micro_batch: int, chunk: int | None = None) -> Slot:
    """The first half of a backward pass: the gradients of a chunk's inputs."""
    return Slot(Strand(Direction.BACKWARD, chunk, Share.INPUT), micro_batch)


def weight_gradient(micro_batch: int, chunk: int | None = None) -> Slot:
    """The other half, which may run much later: the gradients of a chunk's weights."""
    return Slot(Strand(Direction.BACKWARD, chunk, Share.WEIGHT), micro_batch)


def together(*slots: Slot) -> Action:
    """An action that runs these slots, the first of which comes first where nothing else
    decides."""
    return Action(slots)
