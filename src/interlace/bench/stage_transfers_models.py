"""The models of the bench of stages, in the layout of this rank's stage."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.api import compile_step
from interlace.bench.pipeline_rivals import build_rival
from interlace.bench.pipeline_world import Batch, StepFunction, batches_of, loss_of, step_loss
from interlace.bench.stage_transfers_cases import StageCase
from interlace.bench.tensor_share import ShareSize
from interlace.bench.tensor_share_world import SplitGpt
from interlace.config import PlanConfig
from interlace.models.u_transformer import UTransformer, UTransformerConfig
from interlace.schedules.listed import ListedSchedule
from interlace.step import Step

_RANKS = 2
"""Of a stage."""
_GPT = ShareSize(width=256, heads=4, blocks=4, words=64, length=128)
_U_NET = UTransformerConfig(channels=32, image=8, heads=4, groups=8)
_SPLITS = {
    ("gpt", 2): ("blocks.2",),
    ("gpt", 4): ("blocks.1", "blocks.2", "blocks.3"),
    ("u_transformer", 2): ("up.2",),
    ("u_transformer", 4): ("middle", "up.2", "up.2.grow"),
}
"""With which sub-modules chunks begin, by model and number of chunks. Ranks have 52 and 48 % of the
U-Transformer's FLOPs with two chunks, 50.4 and 49.6 % with four, which are folded, so that the
widest skips stay on their rank."""
_CHUNKS = {"zb_v": 4}
"""Chunks of a schedule, where they are not two."""


class StageModel:
    """A model of a case on this rank: its layout, its rows of a micro-batch, its steps."""

    def __init__(self, case: StageCase) -> None:
        """Collective on the default group, as meshes are made."""
        self.case = case
        self.ranks_of_stage = _RANKS
        self.meshes = tuple(
            DeviceMesh("cpu", list(range(first, first + _RANKS)), mesh_dim_names=(axis,))
            for first, axis in zip((0, _RANKS), case.layouts, strict=True)
        )
        self._modules: dict[str, nn.Module] = {}

    @property
    def _stage(self) -> int:
        return dist.get_rank() // _RANKS

    @property
    def _mesh(self) -> DeviceMesh:
        return self.meshes[self._stage]

    def built(self) -> nn.Module:
        """The whole model, with the weights of every other rank, laid out for this stage."""
        torch.manual_seed(0)
        if self.case.model == "gpt":
            split = self.case.layouts[self._stage] == "tp"
            return SplitGpt(_GPT, self._mesh if split else None)
        return UTransformer(_U_NET)

    def chunk_names(self, schedule: str) -> tuple[str, ...]:
        """The sub-modules with which chunks of a schedule begin; the first has an empty name."""
        return ("", *_SPLITS[self.case.model, _CHUNKS.get(schedule, 2)])

    def compiled(self, name: str, schedule: str | ListedSchedule, example: Batch) -> Step:
        """Its step by a schedule, which is called so from here on."""
        module = self._modules[name] = self.built()
        listed = isinstance(schedule, ListedSchedule)
        return compile_step(
            module, step_loss if self.case.model == "gpt" else _image_loss, example,
            stages=self.meshes, schedule=schedule,
            split_at=schedule.split_at if listed else self.chunk_names(schedule)[1:],
            config=PlanConfig(cache=False, profile_repeats=1),
        )  # fmt: skip

    def batches(self) -> list[Batch]:
        """This rank's rows of the micro-batches of a step."""
        case = self.case
        if case.model == "gpt":
            whole = batches_of(
                {"words": _GPT.words, "batch": case.samples, "length": _GPT.length,
                 "micro_batches": case.micro_batches}
            )  # fmt: skip
        else:
            whole = [_images(case.samples, number) for number in range(case.micro_batches)]
        if case.layouts[self._stage] == "tp":
            return whole
        place = dist.get_rank() % _RANKS
        return [tuple(each.chunk(_RANKS)[place].clone() for each in batch) for batch in whole]

    def forget_gradients(self, schedule: str) -> None:
        """Before a step."""
        for parameter in self._modules[schedule].parameters():
            parameter.grad = None

    def gradients(self, schedule: str) -> dict[str, Tensor]:
        """This rank's parts."""
        named = self._modules[schedule].named_parameters()
        return {name: _local(p.grad) for name, p in named if p.grad is not None}

    def same_parts(
        self, found: Mapping[str, Any], expected: Mapping[str, Any], *, moved: bool
    ) -> bool:
        """Whether these are equal for all weights. With `moved` some weights are in the other
        stage; if that is laid out otherwise, its ranks hold other parts, and names are compared."""
        if moved and len(set(self.case.layouts)) > 1:
            return found.keys() == expected.keys()
        return found == expected

    def rival(self) -> StepFunction:
        """PyTorch's own 1F1B with the same modules."""
        mesh = init_device_mesh("cpu", (2, _RANKS), mesh_dim_names=("pp", "tp"))

        def chunk_of(_size: Mapping[str, int], chunk: int, chunks: int) -> nn.Module:
            return SplitGpt(_GPT, mesh["tp"], chunk, chunks)

        steps = {"micro_batches": self.case.micro_batches}
        run = build_rival(chunk_of, steps, "1F1B", 1, loss_of, mesh.get_group("pp"))

        def way(batches: Sequence[Batch]) -> dict[str, Tensor]:
            return {name: _local(each) for name, each in run(batches).items()}

        return way


def model_of(case: StageCase) -> StageModel:
    """The model of a case. Collective on the default group."""
    return StageModel(case)


def _image_loss(module: nn.Module, noisy: Tensor, level: Tensor, clean: Tensor) -> Tensor:
    return (module(noisy, level) - clean).square().mean()


def _images(count: int, number: int) -> Batch:
    """Random images under noise: nothing is learned here."""
    draw = torch.Generator().manual_seed(number)
    config = _U_NET
    size = config.image
    noisy = torch.randn(count, config.channels_in, size, size, generator=draw)
    clean = torch.randn(count, config.channels_out, size, size, generator=draw)
    return noisy, torch.rand(count, generator=draw), clean


def _local(tensor: Tensor) -> Tensor:
    return cast("Tensor", tensor.to_local()) if isinstance(tensor, DTensor) else tensor
