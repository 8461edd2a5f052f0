"""What the ranks of a run must hold alike: code, files, weights, the order of the data, state.

They are compared when the session is built, after a checkpoint is taken up, and before one is
written. A rank that differs in any of these trains another model than the others, and nothing
that it does fails.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor

from interlace.config import RunConfig
from interlace.data.batches import Batches
from interlace.model_config import Architecture
from interlace.models.hugging_face_files import folder_digest
from interlace.ranks.agree import (
    Content,
    check_agreement,
    check_contents,
    environment_fields,
    refused_together,
)
from interlace.ranks.replicas import module_buffers, random_state, tensor_contents
from interlace.ranks.small_collectives import alone
from interlace.ranks.source_files import own_code_contents, package_contents
from interlace.search.planner import SEARCHES
from interlace.train.session import Session
from interlace.train.weights import check_weights

_WEIGHTS_HINT = (
    "the ranks that share a weight must begin with the same one: build the model from the same "
    "seed and files on all of them"
)
"""Hint where weights differ before the first step."""
_STATE_HINT = (
    "a rank went its own way, by a fault of its machine or by code that differs per rank; start "
    "again from the last checkpoint"
)
"""Hint where what a checkpoint would hold differs."""


def check_software(config: RunConfig) -> None:
    """Configuration, versions, the package's own files, and those of a user's own model and search.
    Collective; before anything is built: with other shapes on one rank the first collective would
    hang."""
    if alone():
        return
    own_code, fields = _own_code(config), _configuration(config) | _model_software(config)
    check_agreement(fields | environment_fields())
    check_contents(package_contents() + own_code_contents(own_code))


def check_built(session: Session) -> None:
    """Data, graphs, plans, weights and buffers, before the first step. Collective."""
    if alone():
        return
    built, drawn, order = _built(session), _draws(session), _order(session.batches())
    check_agreement({"data": session.dataset.digest})
    with refused_together():  # stages that are laid out each in its own way compare by themselves
        check_agreement(built, group=session.same_graphs)
    if session.stages is not None and session.main is not None:
        check_contents(session.main.contents)
    check_weights(session.weights, _WEIGHTS_HINT, session.same_graphs)
    check_contents(drawn, hint=_WEIGHTS_HINT)
    check_agreement(order)


def check_state(
    session: Session,
    step: int,
    batches: Batches,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """What a checkpoint of `step` holds, `tensors` by name, and where the ranks stand. Collective
    on `group`."""
    if alone(group):
        return
    fields = {
        "the step": str(step),
        "the learning rate": str([each["lr"] for each in session.optimizer.param_groups]),
        "the step of the learning rate": str(session.schedule.last_epoch),
    }
    check_agreement(fields | _order(batches), group=group)
    named = {_label(name): each for name, each in tensors.items() if not name.startswith("rng.")}
    of_stage = session.weights.group or group
    with refused_together(group):  # ranks of other stages have nothing to compare with these
        check_contents(tensor_contents(named, group=of_stage), group=of_stage, hint=_STATE_HINT)
    alike = session.same_graphs or group
    with refused_together(group):
        contents = module_buffers(session.weights.module, alike) + _generators(session)
        check_contents(contents, group=alike, hint=_STATE_HINT)


def _configuration(config: RunConfig) -> dict[str, str]:
    """Every value by its name in the run file; only where files are written may differ."""
    tables = {name: value for name, value in config.as_dict().items() if name != "output"}
    return _by_name(tables)


def _by_name(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    fields: dict[str, str] = {}
    for key, value in values.items():
        name = prefix + key
        fields |= _by_name(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return fields


def _own_code(config: RunConfig) -> list[str]:
    """The modules of a user's own that the run file names."""
    named = [config.plan.search]
    if config.model.source == "interlace":
        named.append(config.model.architecture)
    return [name for name in named if name not in (*get_args(Architecture), *SEARCHES)]


def _model_software(config: RunConfig) -> dict[str, str]:
    """What a published model is made from, where one is asked for."""
    found = {}
    # What is missing on all ranks is refused by name later, where it is needed.
    if config.model.source == "hugging_face":
        try:
            found["transformers version"] = importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError:
            found["transformers version"] = "not installed"
    if config.model.config:
        try:
            digest = folder_digest(Path(config.model.config))
        except OSError as error:
            digest = f"unreadable: {error.strerror}"
        found["the files of model.config"] = digest
    return found


def _built(session: Session) -> dict[str, str]:
    fields = {}
    if session.main is not None:
        fields["graph"] = session.main.strands.measured.digest
    if session.stages is not None:  # whose plans differ
        return fields
    plans = {mode: step.plan for mode, step in session.steps.items()}
    return fields | {f"plan of mode {mode}": plan.digest for mode, plan in plans.items()}


def _order(batches: Batches) -> dict[str, str]:
    """Which samples come next, and in which order."""
    state = batches.state_dict()
    return {
        "the position in the data": json.dumps(state),
        "the order of the data": batches.order_digest(),
    }


def _label(name: str) -> str:
    """A tensor of a checkpoint, in words."""
    kind, _, rest = name.partition(".")
    if kind == "weights":
        return f"weight {rest!r}"
    weight, _, key = rest.rpartition(".")
    return f"{key} of the optimizer for {weight!r}"


def _draws(session: Session) -> list[Content]:
    """Ranks that hold different parts of the weights must have drawn them alike: random generators
    that began differently never meet."""
    return [Content(name="the random state after the model was built", digest=session.drawn)]


def _generators(session: Session) -> list[Content]:
    """Eager steps draw masks of dropout from torch's generator, which must be the same ones on the
    ranks that share a layer."""
    if session.config.strands != "eager" or session.meshes.tensor.size() == 1:
        return []
    place = f"{session.meshes.data_rank} {session.meshes.context.get_local_rank()}"
    state = random_state(session.device)
    return [Content(name="the random state", digest=state, layout="data", part=place)]
