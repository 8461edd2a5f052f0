"""`interlace explain`: what a job spends on communication, and what hiding it could gain."""

import json as json_format
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from interlace.cli.options import Verbose
from interlace.errors import InputError


def explain(
    *sources: Path,
    steps: str = "",
    mark: str = "",
    between: str = "",
    micro_batches: int = 0,
    mode: str = "",
    json: Annotated[bool, Parameter(negative="")] = False,
    kineto: Path | None = None,
    verbose: Verbose = False,
) -> int:
    """Say what a run or a trace of torch.profiler spends on communication, what of it two strands
    and decomposition could hide, and which settings to try.

    Parameters
    ----------
    sources
        Output folder of a run, or traces of torch.profiler (.json or .json.gz), one for each rank,
        or a folder with them.
    steps
        Steps of a trace: 5, or 5-8. Without it all but the last.
    mark
        Name of the annotation around each step, if it is not the one of prof.step().
    between
        A time in place of steps, in milliseconds from the first event of the trace: 120:480.
    micro_batches
        Micro-batches of the step that is considered; 0 takes those of the trace, or 4 for one.
    mode
        Of a run: the way of running that is explained, 1, eager or 2.
    json
        Print everything as JSON; times are nanoseconds.
    kineto
        Of a run: also write its recorded steps into this folder as traces that tools for
        torch.profiler's traces read.
    verbose
        Show where an error came from.
    """
    from interlace.explain.explain_text import as_text  # noqa: PLC0415  only when it runs
    from interlace.explain.explanation import as_run  # noqa: PLC0415
    from interlace.explain.explanation import explain as explain_sources  # noqa: PLC0415
    from interlace.explain.kineto_writer import write_kineto  # noqa: PLC0415
    from interlace.explain.step_choice import StepChoice  # noqa: PLC0415

    choice = StepChoice.of(mark, steps, between)
    run = as_run(sources) if kineto is not None else None
    if kineto is not None and run is None:
        raise InputError("--kineto writes the recorded steps of a run", hint="give a run's folder")
    found = explain_sources(sources, choice, micro_batches=micro_batches, mode=mode)
    print(json_format.dumps(found.as_json(), indent=2) if json else as_text(found))
    if run is not None and kineto is not None and not json:
        print()
    for path in write_kineto(run, kineto) if run is not None and kineto is not None else ():
        if not json:
            print(path)
    return 0
