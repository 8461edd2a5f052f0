"""From a name to a schedule, and from a schedule to the actions and phases of a step."""

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, cast

from interlace import schedules
from interlace.errors import InputError, nearest
from interlace.garbage import no_collections
from interlace.ir.actions import Action, Direction, Share, Strand, labels_of
from interlace.ir.graph import OpGraph
from interlace.ir.phases import phase_graph, whole_graph
from interlace.ir.plan import PhasePlan, Plan
from interlace.ir.stage_messages import Edge
from interlace.own_code import load_function
from interlace.schedules.declared import Declared, declared_of
from interlace.schedules.listed import READERS, ListedSchedule, read_listed
from interlace.schedules.passes import with_ends, with_heads, with_once_a_step
from interlace.schedules.verify import check_ranks

_ALSO = {
    "1f1b": "one_f_one_b",
    "eager1f1b": "eager_one_f_one_b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "gpipe",
    "gpipe": "gpipe",
    "zbh1": "zb_h1",
    "zbh2": "zb_h2",
    "zbv": "zb_v",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dual_pipe_v",
}
"""Names of the same schedules elsewhere (papers, torch.distributed.pipelining), in small letters
and without marks between words."""
PLAIN = "one_f_one_b"
"""1F1B, the schedule of a pipeline that others are compared with."""
_OF_STRANDS = {1: "one_strand", 2: "two_strand"}
"""Of a model on one stage, by the number of strands."""
_HALVES = (Share.INPUT, Share.WEIGHT)
"""Shares of a backward that was cut in two."""
_CALL = re.compile(r"([^()]+)\((.*)\)")
"""Finds a schedule with options behind its name: `eager_folded(depth=5)`."""
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(-?\d+)\s*")
"""Finds one of these."""
_NOT_OPTIONS = ("ranks", "micro_batches")
"""Of a schedule's parameters those that the job gives."""
ScheduleFunction = Callable[..., tuple[tuple[Action, ...], ...]]
"""`(ranks, micro_batches, chunks) -> for each rank a tuple of actions`; further parameters with
defaults are options."""

MOST = 8
"""Most micro-batches of the steps in which phases are looked for; a choice. Schedules repeat
themselves long before, as at most one more micro-batch per chunk is in flight."""


@dataclass(frozen=True)
class Schedule:
    """A function that gives actions, under a name that finds it again."""

    name: str
    """A file of this package, `module:function`, or a file with a list."""
    function: ScheduleFunction

    is_alone: ClassVar[bool] = True
    """Whether one rank runs the whole model, and not a stage of it (`schedules.stage`)."""

    @property
    def chunks(self) -> int:
        """How many chunks a rank has: the default of the function's `chunks`, else 1."""
        if isinstance(self.function, ListedSchedule):
            return self.function.chunks
        parameter = inspect.signature(self.function).parameters.get("chunks")
        given = parameter is not None and parameter.default is not inspect.Parameter.empty
        return int(parameter.default) if parameter is not None and given else 1

    @property
    def split_at(self) -> tuple[str, ...]:
        """The sub-modules with which chunks begin, but the first, if it was made for one cut."""
        return self.function.split_at if isinstance(self.function, ListedSchedule) else ()

    @property
    def declared(self) -> Declared:
        """What it says of itself, beside its actions."""
        return declared_of(self.function)

    def variants(self, ranks: int) -> "tuple[Schedule, ...]":
        """Itself with each choice of options that it declares, its default last; itself alone if it
        declares none."""
        choices = self.declared.variants
        if choices is None:
            return (self,)
        return tuple(
            Schedule(*with_options(self.name, self.function, options)) for options in choices(ranks)
        )

    @property
    def seen(self) -> int:
        """How many micro-batches of a step show all that it does: those of a list, else `MOST`."""
        return self.function.micro_batches if isinstance(self.function, ListedSchedule) else MOST

    @property
    def most(self) -> int | None:
        """Most micro-batches of a step, where it is a list; else there is no limit."""
        return self.seen if self._is_listed else None

    @property
    def cuts_backwards(self) -> bool:
        """Whether it runs the gradients of inputs and those of weights apart."""
        return self._cuts(self.of_ranks(1, self.seen))

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the graphs that it needs: forward and backward of each chunk, and the halves
        of backwards if it runs them apart."""
        return self._graphs_of(range(self.chunks) if self.chunks > 1 else (None,))

    def _graphs_of(self, numbers: Collection[int | None]) -> tuple[str, ...]:
        found = [Strand(way, number).graph for way in Direction for number in numbers]
        shares = _HALVES if self.cuts_backwards else ()
        backward = Direction.BACKWARD
        found += [Strand(backward, n, share).graph for n in numbers for share in shares]
        return tuple(found)

    @property
    def interleaves(self) -> bool:
        """Whether some action runs two strands."""
        return any("+" in phase for phase in self.phases(self.graphs))

    def actions(
        self, micro_batches: int, graphs: Collection[str], *, head: bool = False
    ) -> tuple[Action, ...]:
        """What this rank runs in a step; `graphs` names the graphs that it has, and with `head`
        the first operators of a forward run one action ahead.

        Raises InputError if the schedule cannot run so, naming the action."""
        actions = self.of_ranks(1, micro_batches, chunk_count(graphs))[0]
        self._check_halves(actions, graphs)
        actions = with_ends(actions, graphs)
        if head:
            actions = with_heads(actions)
        return with_once_a_step(actions, graphs)

    @no_collections()
    def of_ranks(
        self,
        ranks: int,
        micro_batches: int,
        chunks: int | None = None,
        *,
        edges: Collection[Edge] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> tuple[tuple[Action, ...], ...]:
        """What each rank of a pipeline runs in a step, without messages
        (`schedules.sends_receives`). `chunks` are those of one rank, `edges` say which chunk reads
        which (by default each the one before), and `options` are the function's own.

        Raises InputError if the schedule cannot run so, naming the action."""
        chunks = self.chunks if chunks is None else chunks
        found = self.unproved(ranks, micro_batches, chunks, options=options)
        total = ranks * chunks
        check_ranks(found, micro_batches=micro_batches, chunks=total, name=self.name, edges=edges)
        return found

    def unproved(
        self,
        ranks: int,
        micro_batches: int,
        chunks: int,
        *,
        options: Mapping[str, object] | None = None,
    ) -> tuple[tuple[Action, ...], ...]:
        """The same without the proof that the actions can run, which takes most of the time."""
        for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
            if value < 1:
                raise InputError(
                    f"schedule {self.name!r} cannot run with {name} = {value}", hint="1 or more"
                )
        given = self.function(
            ranks=ranks, micro_batches=micro_batches, chunks=chunks, **self._known(options or {})
        )
        return self._checked(given, ranks)

    def digest(self, graphs: Collection[str], *, head: bool = False) -> str:
        """A hash of the actions of steps of 2 to `MOST` micro-batches, or of as many as a list has;
        ranks that run one schedule have the same."""
        counts = (self.seen,) if self._is_listed else range(2, MOST + 1)
        lines = [text for count in counts for text in self.texts(count, graphs, head=head)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def phases(self, graphs: Collection[str], *, head: bool = False) -> tuple[str, ...]:
        """All phases that steps of any number of micro-batches run, in order of appearance."""
        found: dict[str, None] = {}
        for count in self.counts():
            for action in self.actions(count, graphs, head=head):
                found.setdefault(action.phase)
        return tuple(found)

    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches whose steps have all phases between them. A list can be any, so
        all numbers that it runs."""
        return tuple(range(self.seen, 0 if self._is_listed else 1, -1))

    @property
    def _is_listed(self) -> bool:
        return isinstance(self.function, ListedSchedule)

    def texts(self, micro_batches: int, graphs: Collection[str], *, head: bool) -> list[str]:
        """The actions of a step, as text."""
        return [str(action) for action in self.actions(micro_batches, graphs, head=head)]

    @staticmethod
    def _cuts(ranks: Collection[Collection[Action]]) -> bool:
        slots = (slot for actions in ranks for action in actions for slot in action.slots)
        return any(slot.strand.share in _HALVES for slot in slots)

    def _check_halves(self, actions: Collection[Action], graphs: Collection[str]) -> None:
        """Raise InputError for halves of backwards where the graphs are whole."""
        for action in actions:
            for slot in action.slots:
                if slot.strand.share in _HALVES and slot.strand.graph not in graphs:
                    raise InputError(
                        f"schedule {self.name!r} runs {slot.strand.text!r}, and the backward "
                        "graphs of this step are whole",
                        hint="take folded or two_strand, which run them whole",
                    )

    def _known(self, options: Mapping[str, object]) -> Mapping[str, object]:
        parameters = inspect.signature(self.function).parameters
        own = [name for name in parameters if name not in ("ranks", "micro_batches", "chunks")]
        for name in options:
            if name not in own:
                raise InputError(
                    f"schedule {self.name!r} has no option {name!r}",
                    hint=nearest(name, own) if own else "it has none",
                )
        return options

    def _checked(self, given: object, ranks: int) -> tuple[tuple[Action, ...], ...]:
        per_rank = given if isinstance(given, tuple) else ()
        are_actions = all(
            isinstance(actions, tuple) and actions and all(isinstance(a, Action) for a in actions)
            for actions in per_rank
        )
        if len(per_rank) != ranks or not are_actions:
            wanted = "one rank, not a tuple with one tuple" if ranks == 1 else (
                f"{ranks} ranks, not a tuple with {ranks} tuples"
            )  # fmt: skip
            raise InputError(
                f"schedule {self.name!r} gave {given!r:.80} for {wanted} of actions",
                hint="return ((action, action, ...),), as in interlace/schedules/two_strand.py",
            )
        return cast("tuple[tuple[Action, ...], ...]", per_rank)


def find(schedule: str | ScheduleFunction) -> Schedule:
    """The schedule of this name: a file of this package or `module:function`, either with options
    in brackets behind it (`interleaved(chunks=4)`), a file with a list (.txt, .csv); or a function
    itself.

    Raises InputError if there is none."""
    if isinstance(schedule, ListedSchedule):
        return Schedule(schedule.name, schedule)
    if isinstance(schedule, str) and Path(schedule).suffix in READERS:
        return Schedule(schedule, read_listed(Path(schedule)))
    if not isinstance(schedule, str):
        where = f"{getattr(schedule, '__module__', '?')}:{getattr(schedule, '__qualname__', '?')}"
        own = where.removeprefix(f"{schedules.__name__}.").partition(":")
        return Schedule(own[0] if own[0] == own[2] else where, schedule)
    schedule, options = split_options(schedule)
    if ":" in schedule:
        loaded = cast("ScheduleFunction", load_function(schedule, "schedule"))
        return Schedule(*with_options(schedule, loaded, options))
    known = names()
    schedule = _ALSO.get(re.sub("[_ -]", "", schedule.lower()), schedule)
    if schedule == "searched":
        raise InputError(
            "schedule 'searched' is no rule: it is a list, made for one model",
            hint="write one with interlace plan RUN --search-pipeline -o FILE.txt, and name the "
            "file",
        )
    if schedule not in known:
        raise InputError(
            f"unknown schedule {schedule!r}",
            hint=f"{nearest(schedule, known)} A schedule of your own is 'module:function', "
            "or a file with one (.txt, .csv).",
        )
    module = importlib.import_module(f"{schedules.__name__}.{schedule}")
    return Schedule(*with_options(schedule, getattr(module, schedule), options))


@lru_cache(maxsize=2)
def of_strands(count: int) -> Schedule:
    """The schedule of a model on one stage with one or two strands."""
    return find(_OF_STRANDS[count])


def names() -> tuple[str, ...]:
    """The schedules of this package: its modules that have a function of their own name."""
    found = [module.name for module in pkgutil.iter_modules(schedules.__path__)]
    modules = {name: importlib.import_module(f"{schedules.__name__}.{name}") for name in found}
    return tuple(
        name for name, module in modules.items()
        if getattr(getattr(module, name, None), "__module__", "") == module.__name__
    )  # fmt: skip


def chunk_count(graphs: Collection[str]) -> int:
    """How many chunks of the model a rank has, from the names of its graphs."""
    return len(labels_of(graphs, Direction.FORWARD, Share.WHOLE))


def sequential(graphs: Mapping[str, OpGraph], schedule: Schedule | None = None) -> Plan:
    """The graphs of the strands in the order in which they were traced: by default one strand, else
    by a schedule whose actions run one strand each."""
    schedule = schedule or find("one_strand")
    orders = {name: phase_graph(name, graphs, 0).order for name in schedule.phases(graphs)}
    phases = {name: PhasePlan(order, 0, 0) for name, order in orders.items()}
    return Plan("sequential", whole_graph(graphs).digest, "-", schedule.name, phases)


def validate(
    plan: Plan, graphs: Mapping[str, OpGraph], where: str, schedule: Schedule | None = None
) -> None:
    """Raise InputError unless `plan` has a valid order for every phase of its schedule, and no
    phase of another one. `schedule` is looked up by the plan's name if it is not given."""
    schedule = schedule or find(plan.schedule)
    plan.validate(graphs, where)
    needed = schedule.phases(graphs, head=bool(plan.head))
    for name in needed:
        if plan.of_phase(name) is None:
            raise InputError(f"{where}: phase {name!r} is missing", hint="plan again")
    for name in plan.phases:
        if name not in needed:
            raise InputError(
                f"{where}: phase {name!r} is none of schedule {schedule.name!r}: "
                f"{', '.join(needed)}",
                hint="plan again",
            )


def split_options(text: str) -> tuple[str, Mapping[str, int]]:
    """`name(option=number, ...)`, as a run file gives it, as the name and its options; a bare name
    has none.

    Raises InputError for anything else in brackets."""
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return text, {}
    name, given = found[1].strip(), found[2]
    options: dict[str, int] = {}
    for each in given.split(","):
        option = _OPTION.fullmatch(each)
        if option is None:
            raise InputError(
                f"schedule {text!r}: {each.strip()!r} is no option and its whole number",
                hint="write it as eager_folded(depth=5)",
            )
        options[option[1]] = int(option[2])
    return name, options


def with_options(
    name: str, function: Callable[..., Any], options: Mapping[str, int]
) -> tuple[str, Callable[..., Any]]:
    """A schedule's function with these options as its defaults, and a name that says so. Raises
    InputError for an option that it has not."""
    if not options:
        return name, function
    known = [each for each in inspect.signature(function).parameters if each not in _NOT_OPTIONS]
    for option in options:
        if option not in known:
            raise InputError(
                f"schedule {name!r} has no option {option!r}",
                hint=nearest(option, known) if known else "it has none",
            )
    text = ",".join(f"{option}={value}" for option, value in options.items())
    made: Any = partial(function, **options)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    made.declared = declared_of(function).without_choices()
    return f"{name}({text})", made
