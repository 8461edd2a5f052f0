"""`interlace schedule`: schedules of a pipeline, simulated, verified, drawn and written."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from interlace.cli.options import Verbose
from interlace.errors import InputError

SEARCHED = "searched"
"""The name of what is searched."""
_TIMES_MS = (1.0, 1.0, 1.0, 0.0)
"""Forward, gradients of inputs and of weights, transfer, if nothing is said."""


@dataclass(frozen=True)
class SearchFlags:
    """What `searched` asks for besides ranks, micro-batches and overlap."""

    costs: Path | None = None
    """With `searched`: a TOML file with the units of a model and what they cost."""
    memory_gib: float = 0.0
    """With `searched`: most that a rank may hold and keep; 0 for no limit."""
    most_chunks: int = 2
    """With `searched`: most chunks that a rank has on average."""
    tries: int = 6000
    """With `searched`: how many changes are tried."""


SearchOptions = Annotated[SearchFlags, Parameter(name="*")]
"""Each of them as a flag."""


def schedule(
    name: str = "",
    /,
    *,
    ranks: int = 4,
    micro_batches: int = 8,
    forward_ms: float = _TIMES_MS[0],
    input_ms: float = _TIMES_MS[1],
    weight_ms: float = _TIMES_MS[2],
    transfer_ms: float = _TIMES_MS[3],
    overlap: float = 0.0,
    form: Literal["grid", "text", "csv"] = "grid",
    messages: Annotated[bool, Parameter(negative="")] = False,
    picture: Path | None = None,
    json: Path | None = None,
    search: SearchOptions = SearchFlags(),
    verbose: Verbose = False,
) -> int:
    """Compare schedules of a pipeline by simulation, or verify, draw and write one of them.

    Parameters
    ----------
    name
        A schedule (one_f_one_b or 1F1B, folded, ...), 'module:function' for your own, or a file
        with one as text (.txt) or in the CSV form of torch.distributed.pipelining (.csv). Without
        it all schedules are compared. `searched` finds one for the model of --costs: where it is
        cut, which rank has which chunk, and the order.
    ranks
        Ranks of the pipeline.
    micro_batches
        Micro-batches of a step.
    forward_ms
        Time of a rank's part of the model for one micro-batch, forward; ranks are alike.
    input_ms
        The same for the gradients of inputs.
    weight_ms
        The same for the gradients of weights.
    transfer_ms
        Time of what a rank hands to the next, beside compute.
    overlap
        How much shorter a forward and a backward are side by side, as a share of their time (0 to
        1).
    form
        How one schedule is written to standard output.
    messages
        Write its sends and receives too (text and csv).
    picture
        Also draw it to this .png file.
    json
        Also write times, bubbles and memory to this file.
    verbose
        Show where an error came from.
    """
    if _is_search(name, search, (forward_ms, input_ms, weight_ms, transfer_ms)):
        from interlace.report.searched_build import SearchWishes, show_searched  # noqa: PLC0415

        wishes = SearchWishes(ranks, micro_batches, overlap, **asdict(search))
        return show_searched(wishes, form=form, messages=messages, picture=picture, json=json)
    from interlace.report.pipeline_build import StageTimes, show_all, show_one  # noqa: PLC0415  slow

    times = StageTimes.of_ms(
        forward=forward_ms, input=input_ms, weight=weight_ms, transfer=transfer_ms, overlap=overlap
    )
    if not name:
        return show_all(ranks, micro_batches, times, picture=picture, json=json)
    return show_one(
        name, ranks, micro_batches, times, form=form, messages=messages, picture=picture, json=json
    )


def _is_search(name: str, search: SearchFlags, times_ms: tuple[float, ...]) -> bool:
    """Whether a schedule is to be searched. Raises InputError for options that would not count."""
    hint = f"interlace schedule {SEARCHED} --costs examples/uneven_pipeline.toml"
    if name != SEARCHED:
        if search != SearchFlags():
            raise InputError(
                "--costs, --memory-gib, --most-chunks and --tries belong to a search", hint=hint
            )
        return False
    if search.costs is None:
        raise InputError(f"{SEARCHED!r} needs --costs FILE", hint=hint)
    if times_ms != _TIMES_MS:
        raise InputError(
            f"{SEARCHED!r} takes times from {search.costs}, not from --forward-ms, --input-ms, "
            "--weight-ms or --transfer-ms",
            hint="leave them out",
        )
    return True
