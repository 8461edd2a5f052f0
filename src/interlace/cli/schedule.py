"""`interlace schedule`: schedules of a pipeline, simulated, verified, drawn and written."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from interlace.cli.options import Verbose


def schedule(
    name: str = "",
    /,
    *,
    ranks: int = 4,
    micro_batches: int = 8,
    forward_ms: float = 1.0,
    input_ms: float = 1.0,
    weight_ms: float = 1.0,
    transfer_ms: float = 0.0,
    overlap: float = 0.0,
    form: Literal["grid", "text", "csv"] = "grid",
    messages: Annotated[bool, Parameter(negative="")] = False,
    picture: Path | None = None,
    json: Path | None = None,
    verbose: Verbose = False,
) -> int:
    """Compare schedules of a pipeline by simulation, or verify, draw and write one of them.

    Parameters
    ----------
    name
        A schedule (one_f_one_b or 1F1B, folded, ...), 'module:function' for your own, or a file
        with one as text (.txt) or in the CSV form of torch.distributed.pipelining (.csv). Without
        it all schedules are compared.
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
    from interlace.report.pipeline_build import StageTimes, show_all, show_one  # noqa: PLC0415  slow

    times = StageTimes.of_ms(
        forward=forward_ms,
        input=input_ms,
        weight=weight_ms,
        transfer=transfer_ms,
        overlap=overlap,
    )
    if not name:
        return show_all(ranks, micro_batches, times, picture=picture, json=json)
    return show_one(
        name, ranks, micro_batches, times, form=form, messages=messages, picture=picture, json=json
    )
