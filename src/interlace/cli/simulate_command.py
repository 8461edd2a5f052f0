"""`interlace simulate`: one run on a cluster that nobody has at hand."""

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.cli.options import RunFile, RunOptions, Verbose
from interlace.config import RunConfig
from interlace.errors import InputError

if TYPE_CHECKING:
    from interlace.strategy.simulated_job import SimulatedJob
    from interlace.strategy.varied_step import VariedStep


def simulate(
    run: RunFile,
    /,
    *,
    cluster: str,
    trace: Path | None = None,
    picture: Path | None = None,
    json: Path | None = None,
    expert_load: float = 1.0,
    noise: float = 0.0,
    straggler: float = 1.0,
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
    noise
        Also say what a step takes if the times of passes have this deviation over their mean: 0.03
        is 3 %.
    straggler
        Also say what a step takes if one device computes so many times as long as the others.
    verbose
        Show where an error came from.
    """
    from interlace.hardware.cluster_size import load_sized_cluster  # noqa: PLC0415  starts faster
    from interlace.report.simulation_tables import simulation_summary  # noqa: PLC0415
    from interlace.strategy.job_layout import layout_of  # noqa: PLC0415
    from interlace.strategy.simulated_job import simulate_job  # noqa: PLC0415

    if picture is not None and picture.suffix != ".png":
        raise InputError(f"--picture {picture} is not a .png file", hint="end its name in .png")
    config = with_shape(config)
    on, devices = load_sized_cluster(cluster)
    found = simulate_job(config, on, layout_of(config, devices, expert_load))
    varied = _varied(found, noise, straggler)
    print(simulation_summary(found, varied))
    _write(found, varied, trace=trace, picture=picture, json=json)
    return 0


def _write(
    found: "SimulatedJob",
    varied: "dict[str, VariedStep]",
    *,
    trace: Path | None,
    picture: Path | None,
    json: Path | None,
) -> None:
    from interlace.report.pipeline_picture import pipeline_png  # noqa: PLC0415
    from interlace.report.simulation_tables import simulation_data, trace_bytes  # noqa: PLC0415
    from interlace.run_files import write_whole  # noqa: PLC0415

    if trace is not None:
        write_whole(trace, trace_bytes(found, compressed=trace.suffix == ".gz"))
    if picture is not None:
        title = f"{found.layout.schedule} on {found.cluster.name}: one rank of each stage"
        write_whole(picture, pipeline_png(found.actions, found.step, title=title))
    if json is not None:
        data = simulation_data(found, varied) | {"run": found.config.as_dict()}
        write_whole(json, (json_format.dumps(data, indent=1) + "\n").encode())
    for path in (trace, picture, json):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)


def _varied(found: "SimulatedJob", noise: float, straggler: float) -> "dict[str, VariedStep]":
    """What else the step takes, by what varies."""
    from interlace.strategy.varied_step import noisy_step, straggling_step  # noqa: PLC0415

    varied = {}
    if noise:
        varied[f"passes vary by {noise:.3g} of their mean"] = noisy_step(found, noise)
    if straggler != 1:
        text = f"one device computes {straggler:g} times as long"
        varied[text] = straggling_step(found, straggler)
    return varied


def with_shape(config: RunConfig) -> RunConfig:
    """With the shape of the model that `model.config` names, which is read with torch."""
    if not config.model.config or config.model.source != "interlace":
        return config
    from interlace.models.hugging_face_config import published_shape  # noqa: PLC0415  imports torch

    return published_shape(config)
