"""`interlace export`: weights of a run for `transformers`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from interlace.cli.options import Verbose
from interlace.cli.run_file import load_run_config
from interlace.errors import InputError


def export(
    checkpoint: Annotated[Path, Parameter(name="RUN")],
    output: Annotated[Path, Parameter(name="OUT")],
    /,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust_dcp: Annotated[bool, Parameter(negative="")] = False,
    model: str = "",
    verbose: Verbose = False,
) -> int:
    """Write the weights of a run as a Hugging Face folder: config.json and safetensors.

    Parameters
    ----------
    checkpoint
        Output directory of a run, whose newest sound checkpoint is taken, or one checkpoint.
    output
        A folder that does not exist yet.
    dtype
        Type of the written weights; the masters of a run are float32.
    trust_dcp
        RUN is a folder of torch.distributed.checkpoint, and code in its files may run.
    model
        With --trust-dcp: the run file, or preset, whose [model] and [data] tables describe it.
    verbose
        Show where an error came from.
    """
    import torch  # noqa: PLC0415  takes seconds

    from interlace.checkpoint.to_hugging_face import (  # noqa: PLC0415  imports torch
        export_checkpoint,
        export_trusted_dcp,
        find_checkpoint,
    )
    from interlace.models.hugging_face_config import published_shape  # noqa: PLC0415

    if model and not trust_dcp:
        raise InputError(
            f"--model {model} is read with --trust-dcp only: a checkpoint of interlace describes "
            "its model itself",
            hint="leave out --model",
        )
    if trust_dcp:
        if not model:
            raise InputError(
                "--trust-dcp needs --model: such a folder does not describe its model",
                hint="give the run file of the run that wrote it",
            )
        config = published_shape(load_run_config(model))
        length = config.data.sequence_length
        export_trusted_dcp(checkpoint, config.model, length, output, getattr(torch, dtype))
        print(f"weights of {checkpoint}: {output}", file=sys.stderr)
        return 0
    folder, manifest, problems = find_checkpoint(checkpoint)
    for problem in problems:
        print(f"{problem}; trying the one before", file=sys.stderr)
    export_checkpoint(folder, manifest, output, getattr(torch, dtype))
    print(f"weights of {folder}, after step {manifest.step}: {output}", file=sys.stderr)
    return 0
