"""Tensors to safetensors files and back, on any mesh, planned by torch.distributed.checkpoint.

Saving: PyTorch's planner says which box of which global tensor each rank holds and drops
duplicates; plans travel between ranks as JSON. Loading: its metadata is rebuilt from the manifest,
and its planner says which boxes overlap. No pickle on either way.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    StorageReader,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.futures import Future

from interlace.checkpoint.folders import Damaged, read_manifest
from interlace.checkpoint.manifest import (
    DTYPE_NAMES,
    Manifest,
    SavedTensor,
    TensorBox,
    piece_key,
)
from interlace.errors import RunError
from interlace.ranks.small_collectives import gather_json

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
"""Types of tensors that a checkpoint may hold, by name."""


@dataclass(frozen=True)
class SavePieces:
    """Which pieces this rank writes, and where the pieces of all ranks lie."""

    planner: DefaultSavePlanner
    own: list[WriteItem]
    tensors: dict[str, SavedTensor]

    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's pieces in host memory, by key; `tensors` as they were planned."""
        assert tensors.keys() <= self.tensors.keys(), tensors.keys() - self.tensors.keys()
        self.planner.set_up_planner(tensors)
        return {_key(item): _copy(self.planner.resolve_data(item)) for item in self.own}


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def plan_pieces(tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> SavePieces:
    """Deal the pieces of `tensors` (plain or DTensor, any mesh) out to the ranks of `group`.

    Collective. Raises RunError if the shards of a tensor do not cover it exactly once.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    rank = dist.get_rank(group)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    # A rank beyond the last row of a tensor holds none of it.
    own = [item for item in planner.create_local_plan().items if _sizes(item).numel()]
    everyone = gather_json([_encoded(item) for item in own], group)
    plans = [SavePlan([_decoded(each) for each in items]) for items in everyone]
    try:
        plans, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise RunError(
            f"these weights cannot be saved or loaded: {error}",
            hint="shard each dimension evenly, or over one mesh axis only",
        ) from error
    return SavePieces(planner, list(plans[rank].items), _saved_tensors(plans))


def _saved_tensors(plans: list[SavePlan]) -> dict[str, SavedTensor]:
    """What the files of all ranks hold together."""
    facts: dict[str, TensorWriteData] = {}
    pieces: dict[str, list[TensorBox]] = {}
    for owner, plan in enumerate(plans):
        for item in plan.items:
            facts[item.index.fqn] = _facts(item)
            offsets, sizes = tuple(_facts(item).chunk.offsets), tuple(_sizes(item))
            piece = TensorBox(file=file_name(owner), key=_key(item), offsets=offsets, sizes=sizes)
            pieces.setdefault(item.index.fqn, []).append(piece)
    return {
        name: SavedTensor(
            dtype=_dtype_name(facts[name].properties.dtype),
            shape=tuple(facts[name].size),
            pieces=tuple(found),
        )
        for name, found in pieces.items()
    }


class CheckpointReader(StorageReader):
    """Reads a checkpoint of interlace for `torch.distributed.checkpoint.load` and its planners.

    Checksums are not looked at here: `folders.check_file` does that beforehand.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes and pieces of all tensors, from the manifest. Raises Damaged."""
        if self._metadata is None:
            self._metadata = metadata_of(read_manifest(self.folder))
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learn where pieces lie."""
        self._pieces: dict[MetadataIndex, TensorBox] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every box of the plan to where the planner wants it; only these bytes are read."""
        from safetensors import safe_open  # noqa: PLC0415  only runs with checkpoints have it

        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._pieces[item.storage_index].file, []).append(item)
        for name, items in sorted(by_file.items()):
            try:
                opened = safe_open(self.folder / name, framework="pt")
            except FileNotFoundError as error:  # it was there when it was checked
                reason = f"{name} was removed just now, by the run that writes there or by hand"
                raise Damaged(self.folder, reason) from error
            with opened as file:
                for item in items:
                    box = _box(file, self._pieces[item.storage_index].key, item)
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(box)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Read another folder from now on."""
        if checkpoint_id:
            self.folder, self._metadata = Path(checkpoint_id), None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders only."""
        return Path(checkpoint_id).is_dir()


def load_tensors(reader: StorageReader, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` (plain or DTensor, any mesh) in place; every rank reads its own part.

    The checkpoint must have each of them, in its global shape. Not collective.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def whole_tensor(reader: StorageReader, name: str) -> Tensor:
    """A global tensor of a checkpoint, in host memory. KeyError if it is not there."""
    saved = reader.read_metadata().state_dict_metadata[name]
    assert isinstance(saved, TensorStorageMetadata)
    found = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
    load_tensors(reader, found)
    return found[name]


def metadata_of(manifest: Manifest) -> Metadata:
    """PyTorch's description of the tensors; `storage_data` maps its indices to pieces."""
    tensors: dict[str, Any] = {}
    pieces: dict[MetadataIndex, TensorBox] = {}
    for name, saved in manifest.tensors.items():
        chunks = []
        for piece in saved.pieces:
            offsets = torch.Size(piece.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.sizes)))
            pieces[MetadataIndex(name, offsets)] = piece
        properties = TensorProperties(dtype=DTYPES[saved.dtype])
        tensors[name] = TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
    return Metadata(tensors, storage_data=pieces)


def check_headers(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Whether files `names` hold the pieces that the manifest says. Raises Damaged."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    expected: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in names}
    for saved in manifest.tensors.values():
        for piece in saved.pieces:
            if piece.file in expected:
                expected[piece.file][piece.key] = piece.sizes
    for name, pieces in expected.items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                there = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise Damaged(folder, f"{name} is not a safetensors file: {error}") from error
        if there != pieces:
            raise Damaged(folder, f"{name} does not hold the pieces that the manifest lists")


def _box(file: Any, key: str, item: ReadItem) -> Tensor:
    if not item.lengths:  # a single number cannot be sliced
        return file.get_tensor(key)
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    return file.get_slice(key)[tuple(slice(at, at + length) for at, length in ranges)]


def _facts(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _sizes(item: WriteItem) -> torch.Size:
    return _facts(item).chunk.sizes


def _key(item: WriteItem) -> str:
    facts = _facts(item)
    return piece_key(
        item.index.fqn, tuple(facts.chunk.offsets), whole=facts.chunk.sizes == facts.size
    )


def _copy(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    assert name in DTYPES, name
    return name


def _encoded(item: WriteItem) -> list[Any]:
    facts = _facts(item)
    dtype = _dtype_name(facts.properties.dtype)
    offsets, sizes, shape = (
        list(each) for each in (facts.chunk.offsets, facts.chunk.sizes, facts.size)
    )
    return [item.index.fqn, dtype, offsets, sizes, shape]


def _decoded(encoded: list[Any]) -> WriteItem:
    name, dtype, offsets, sizes, shape = encoded
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=DTYPES[dtype]),
            size=torch.Size(shape),
        ),
    )
