"""What a checkpoint holds of a session, and how a session takes it up again.

Tensors, by name: `weights.NAME` (float32 masters), `optimizer.NAME.KEY`, `buffers.NAME` (biases of
routers that steps move), `rng.RANK.cpu` and `rng.RANK.cuda`. Plain values: data position, ranks,
vocabulary, versions. What follows from these (compute weights, learning rates, micro-batches) is
not stored.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import interlace
from interlace.checkpoint.folders import Damaged
from interlace.checkpoint.manifest import BUFFERS, OPTIMIZER, RNG, WEIGHTS, Manifest, SavedTensor
from interlace.checkpoint.request import check_model
from interlace.checkpoint.tensor_files import DTYPES, CheckpointReader, load_tensors
from interlace.data.batches import Batches
from interlace.errors import InputError
from interlace.parallel.local_parts import local
from interlace.parallel.meshes import PIPELINE_AXIS
from interlace.train.expert_load import router_biases
from interlace.train.optimizer import set_step
from interlace.train.session import Session


def state_tensors(session: Session) -> dict[str, Tensor]:
    """Every tensor that must come back; views of the live ones, DTensors where those are."""
    found: dict[str, Tensor] = {}
    for name, master in session.weights.masters.items():
        found[WEIGHTS + name] = master.detach()
    for name, master in session.weights.masters.items():
        for key, value in session.optimizer.state.get(master, {}).items():
            assert isinstance(value, Tensor), f"{key} of {name}"
            found[f"{OPTIMIZER}{name}.{key}"] = value
    return found | _biases(session) | _generators(session, session.rank)


def plain_state(session: Session, batches: Batches) -> dict[str, Any]:
    """Everything else that must come back, as JSON."""
    return {
        "data": batches.state_dict(),
        "ranks": session.world_size,
        "vocabulary": session.vocab_size,
        "versions": {"interlace": interlace.__version__, "torch": str(torch.__version__)},
    }


def mesh_of(session: Session) -> dict[str, int]:
    """Ranks per axis."""
    layout = session.meshes.layout
    names = layout.mesh_dim_names
    assert names is not None
    sizes = {name: layout.size(axis) for axis, name in enumerate(names)}
    if session.stages is None:
        return sizes
    return {PIPELINE_AXIS: session.config.parallel.pipeline, **sizes}


def restore(session: Session, folder: Path, manifest: Manifest, batches: Batches) -> None:
    """Go on from a checkpoint whose files are sound. Raises InputError, before anything is
    changed, if it belongs to another model, other data or another order of the data."""
    _check_model(session, manifest)
    saved_ranks = manifest.state.get("ranks")
    if type(saved_ranks) is not int or saved_ranks < 1:
        raise Damaged(folder, f"it was written by {saved_ranks!r} ranks")
    batches.load_state_dict(manifest.state.get("data", {}))
    masters = session.weights.masters
    optimizer: dict[str, dict[str, Tensor]] = {name: {} for name in masters}
    tensors: dict[str, Tensor] = {WEIGHTS + name: each.detach() for name, each in masters.items()}
    tensors |= _biases(session)
    for saved_name, saved in manifest.tensors.items():
        name, _, key = saved_name.removeprefix(OPTIMIZER).rpartition(".")
        if saved_name.startswith(OPTIMIZER) and name in masters:
            fresh = _fresh(masters[name], saved, session.optimizer)
            optimizer[name][key] = tensors[saved_name] = fresh
    generators = _generators(session, session.rank % saved_ranks)
    generators = {name: each for name, each in generators.items() if name in manifest.tensors}
    load_tensors(CheckpointReader(folder), tensors | generators)
    for name, master in masters.items():
        session.optimizer.state[master] = optimizer[name]
    set_step(session.schedule, manifest.step)
    _set_generators(session, generators)
    session.weights.publish()


def _check_model(session: Session, manifest: Manifest) -> None:
    check_model(session.config, manifest)
    masters = session.weights.masters
    saved = {
        name.removeprefix(WEIGHTS): each.shape
        for name, each in manifest.tensors.items()
        if name.startswith(WEIGHTS)
    }
    if odd := sorted(saved.keys() ^ set(session.weights.names)):
        where = "the checkpoint" if odd[0] in saved else "this run's model"
        raise InputError(
            f"the checkpoint holds another model: only {where} has {odd[0]!r}",
            hint="resume with the [model] table of the checkpoint's run",
        )
    for name, master in masters.items():
        if tuple(master.shape) != saved[name]:
            raise InputError(
                f"{name} has the shape {list(saved[name])} in the checkpoint and "
                f"{list(master.shape)} in this run",
                hint=f"set model.vocab_size to {manifest.state.get('vocabulary')} if it is the "
                "embedding, and the other fields of [model] as they were",
            )


def _fresh(master: nn.Parameter, saved: SavedTensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Room for one value of the optimizer: laid out as the weight, or a counter beside it."""
    dtype = DTYPES[saved.dtype]
    if saved.shape == tuple(master.shape):
        return torch.zeros_like(master, dtype=dtype).detach()
    # As torch.optim makes it: the step counter is on the device only for fused kernels.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.zeros(saved.shape, dtype=dtype, device=local(master).device if on_device else None)


def _biases(session: Session) -> dict[str, Tensor]:
    """Those of routers that steps move, alike on all ranks."""
    found = router_biases(session.weights.module)
    return {BUFFERS + name: bias for name, bias in found.items()}


def _generators(session: Session, rank: int) -> dict[str, Tensor]:
    """States of this process's random generators, named as those of `rank`."""
    found = {f"{RNG}{rank}.cpu": torch.get_rng_state()}
    if session.device.type == "cuda":
        found[f"{RNG}{rank}.cuda"] = torch.cuda.get_rng_state(session.device)
    return found


def _set_generators(session: Session, states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, session.device)
