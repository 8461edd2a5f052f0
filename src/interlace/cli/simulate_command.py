"""`interlace simulate`: one run on a cluster that nobody has at hand."""

import json as json_format
import sys
from pathlib import Path

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.config import RunConfig
from interlace.errors import InputError


def simulate(
    run: RunFile,
    /,
    *,
    cluster: str,
    trace: Path | None = None,
    picture: Path | None = None,
    json: Path | None = None,
    expert_load: float = 1.0,
    config: RunOptions = RunConfig(),  # noqa: B008  frozen
    verbose: Verbose = False,
) -> int:
    """Simulate a step of a run on a cluster: time, MFU, exposed communication, memory.

    Parameters
    ----------
    run
        A TOML run file, or the name of a preset. In its place --model NAME takes a model, and
        --sequence N is short for --data.sequence_length N.
    cluster
        A TOML file or a preset (a100-80, h100, ...), with the number of its devices if the run
        leaves that open: h100x64.
    trace
        Also write all ranks that differ, and the operators of their actions, to this Chrome trace
        (.json or .json.gz).
    picture
        Also draw all ranks that differ to this .png file.
    json
        Also write all figures to this file.
    expert_load
        Rows of the fullest expert over the mean of all, as the metric expert_imbalance of a run
        says; 1 is balanced.
    verbose
        Show where an error came from.
    """
    from interlace.hardware.cluster_size import load_sized_cluster  # noqa: PLC0415  starts faster
    from interlace.report.pipeline_picture import pipeline_png  # noqa: PLC0415
    from interlace.report.simulation_tables import (  # noqa: PLC0415
        simulation_data,
        simulation_summary,
        trace_bytes,
    )
    from interlace.run_files import write_whole  # noqa: PLC0415
    from interlace.strategy.job_layout import layout_of  # noqa: PLC0415
    from interlace.strategy.simulated_job import simulate_job  # noqa: PLC0415

    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")
    config = with_shape(config)
    on, devices = load_sized_cluster(cluster)
    found = simulate_job(config, on, layout_of(config, devices, expert_load))
    print(simulation_summary(found))
    if trace is not None:
        write_whole(trace, trace_bytes(found, compressed=trace.suffix == ".gz"))
    if picture is not None:
        title = f"{found.layout.schedule} on {on.name}: one rank of each stage"
        write_whole(picture, pipeline_png(found.actions, found.step, title=title))
    if json is not None:
        data = simulation_data(found) | {"run": config.as_dict()}
        write_whole(json, (json_format.dumps(data, indent=1) + "\n").encode())
    for path in (trace, picture, json):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
    return 0


def with_shape(config: RunConfig) -> RunConfig:
    """With the shape of the model that `model.config` names, which is read with torch."""
    if not config.model.config or config.model.source != "interlace":
        return config
    from interlace.models.hugging_face_config import published_shape  # noqa: PLC0415  imports torch

    return published_shape(config)
