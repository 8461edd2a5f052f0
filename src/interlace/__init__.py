"""Interlace hides communication in distributed LLM training.

`compile_step` makes an interlaced training step of your own module, `reshard` and `ReshardPlan`
move tensors between device meshes. Importing this package does nothing, not even import torch.
The rooms of the house, from the street to the cellar; arrows of imports point down:

__main__.py   `python -m interlace`, and the command `interlace`
cli/          commands: parse, call one function, print
bench/        measured claims, one file each
pipelining/   the interface of torch.distributed.pipelining, both ways
hf_trainer.py  the Trainer of transformers with interleaved micro-batches
shaped_steps.py  a step for each shape of batches, compiled when it first comes
torchtitan.py  recipes of torchtitan with interleaved micro-batches
api.py        `compile_step`: an interlaced step of a user's own module
train/        a training run: session, loop, runners, comparison, metrics
checkpoint/   checkpoint folders on disk: written whole, checked, read on any mesh
data/         from data files to batches of tokens
explain/      what a job spends on communication, and what hiding it could gain
report/       the records of a run as pages, pictures and tables
step.py       one compiled step: graphs, plan, executor, and where gradients go
compiled.py   from traced graphs to a plan: costs, choice, search
measure/      times measured on this machine: operators alone, in pairs, sites in slices
runtime/      plans run on real processes: executor, recorder, gradients
reshard/      tensors moved between device meshes of any layout
ranks/        processes that are ranks: started, kept together, watched, ended, compared
decompose/    collectives cut into steps under partial compute
graphs/       from a module to executable graphs: trace, passes, export, lower
lab/          slow links and hosts without a cluster
parallel/     how a plain model is laid out over ranks
models/       single-device models, one file each
experts/      operators of mixture-of-experts layers, whose sizes are known at run time only
strategy/     how a job is split over a cluster: simulated from shapes, and searched
search/       a graph and costs in, an issue order out
sim/          what a plan would do, as a timeline
schedules/    which passes of which micro-batches a rank runs side by side, one file each
rules.py      whether a RunConfig can work: the one check that every command makes
degrees.py    the degrees of `[parallel]` and `[pipeline]`: which ranks share what
model_rules.py  models that can work, alone and on the ranks that share them
run_files.py  names of the files in the folder of a run, and readers of them
claims.py     who may write into a directory: one run at a time
hardware/     descriptions of machines and clusters, and times that follow from them
text.py       numbers and tables as people read them
start_progress.py  what a command works on before its first result, as a bar or in lines
config.py     RunConfig: everything that a run is asked to do
model_config.py  ModelConfig: the model of a run
ir/           the shared vocabulary: graphs, plans, costs, timelines as data
own_code.py   a user's own code by its name, `module:name`
toml_text.py  TOML files that people write, with errors that name the line
old_words.py  what words of earlier run files and plans are called now
errors.py     the errors that a user can meet, and their exit codes
garbage.py    Python's search for garbage, put off while something makes millions of objects
presets/      shipped run files, models and clusters
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.api import (
        Step,
        clip_grad_norm_,
        compile_step,
        free_other_stages,
        stage_parameters,
    )
    from interlace.reshard import ReshardPlan, reshard
    from interlace.shaped_steps import ShapedSteps

__all__ = [
    "ReshardPlan",
    "ShapedSteps",
    "Step",
    "__version__",
    "clip_grad_norm_",
    "compile_step",
    "free_other_stages",
    "reshard",
    "stage_parameters",
]
_OF_API = ("Step", "clip_grad_norm_", "compile_step", "free_other_stages", "stage_parameters")
"""Names that `api.py` has."""
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for."""
    if name in _OF_API:
        from interlace import api  # noqa: PLC0415 - imports torch

        return getattr(api, name)
    if name == "ShapedSteps":
        return importlib.import_module("interlace.shaped_steps").ShapedSteps
    if name in ("ReshardPlan", "reshard"):
        package = importlib.import_module("interlace.reshard")
        return package if name == "reshard" else package.ReshardPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
