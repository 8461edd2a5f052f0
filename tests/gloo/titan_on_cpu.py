"""torchtitan on CPU and gloo, where it does not run by itself: what a test has to put in its place.

`prepare()` is called before torchtitan is imported: the type of device is guessed in an import, and
kernels for experts are imported that need Triton. FlexAttention has no backward on a CPU, so the
trainer that is compared with has `PackedAttention` as ours has, and is given a mask made here. Gloo
cannot scale and sum at once, so FSDP2 is told to sum.
"""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import gloo_group
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

LENGTH, VOCABULARY = 32, 2048
SITE = Path(sys.prefix) / "torchtitan"
"""Where `make setup` puts torchtitan and what it needs: in the environment itself, torchao would be
imported by every test of transformers."""
MICRO_BATCHES, SIZE = 3, 2


def prepare() -> None:
    """Make `import torchtitan` possible without a GPU."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))  # behind, so that all else is what other tests have
    from torch import _utils

    _utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    stub: Any = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    stub.__getattr__ = lambda name: None
    sys.modules[stub.__name__] = stub
    warnings.simplefilter("ignore")  # of torchtitan's and torchao's imports
    logging.getLogger().setLevel(logging.ERROR)
    from torchtitan.components import metrics

    metrics.build_device_memory_monitor = Memory  # type: ignore[assignment]
    torch.cpu.get_device_name = lambda device=None: "cpu"  # type: ignore[attr-defined]


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages that recipes import and nothing here runs: pictures, linear attention."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "fla"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {}) if name[0] != "_" else None
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def allow_every_recipe() -> None:
    """Let recipes be made that want newer GPUs, or packages that the tests do without."""
    # Before there is a torchvision, into which transformers would look.
    importlib.import_module("torchtitan.models.flux.config_registry")
    parts = [f"components.quantization.{name}" for name in ("mx", "nvfp4", "float8")]
    for part in ("tools.utils", *parts):
        module: Any = importlib.import_module(f"torchtitan.{part}")
        module.has_cuda_capability = lambda *_: True
    sys.meta_path.append(Missing())


class Memory:
    """What a GPU would be asked for."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def mask(positions: Tensor) -> Tensor:
    """[batch, 1, length, length]: token after token, from the beginning of its document."""
    batch, length = positions.shape
    found = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for row in range(batch):
        start = 0
        for token in range(length):
            start = token if int(positions[row, token]) == 0 else start
            found[row, 0, token, start : token + 1] = True
    return found


def batches(rank: int, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Packed documents of random lengths; some tokens count for nothing."""
    draw = torch.Generator().manual_seed(100 + rank)
    while True:
        tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=draw)
        positions = torch.arange(LENGTH).repeat(size, 1)
        for row in range(size):
            at = int(torch.randint(3, LENGTH, (1,), generator=draw))
            positions[row, at:] -= at
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=draw) < 0.1] = -100
        yield {"input": tokens[:, :-1].clone(), "positions": positions}, labels


def summing(model: nn.Module) -> None:
    """Let FSDP2 sum gradients over ranks, and divide afterwards."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)


@contextmanager
def world() -> Iterator[None]:
    """The process group of all trainers of a process."""
    with gloo_group(120):
        yield


def trainers(plan: Any) -> tuple[Any, Any]:
    """torchtitan's trainer on a CPU, and ours."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

    from interlace.torchtitan import TitanTrainer

    class Joined:
        """The process group is there."""

        config: Any

        def init_distributed(self) -> Any:
            return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    class Stock(Joined, Trainer):
        """Masks are made before the forward, as torchtitan does."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            summing(self.model_parts[0])

        def post_dataloading_process(self, input_dict: Any, labels: Tensor) -> Any:
            positions = input_dict.pop("positions")
            found, labels, _ = super().post_dataloading_process(input_dict, labels)
            return found, labels, {"positions": positions, "attention_masks": mask(positions)}

    class Ours(Joined, TitanTrainer):
        """Times are computed: measuring takes longer than all else."""

    Ours.plan = plan
    return Stock, Ours


def recipe(folder: str, model: str = "llama3", **options: Any) -> Any:
    """torchtitan's debug recipe of a model: two layers, short sequences, data that are drawn."""
    recipes = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    data, words = _parts()
    config = getattr(recipes, f"{model}_debugmodel")()
    config.dump_folder = folder
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dataloader, config.tokenizer = data.Config(), words.Config()
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 1
    training = config.training
    training.seq_len, training.local_batch_size, training.steps = LENGTH, SIZE, 3
    for path, value in options.items():
        part, _, field = path.partition(".")
        setattr(getattr(config, part), field, value)
    ranks = int(os.environ["WORLD_SIZE"]) // config.parallelism.tensor_parallel_degree
    training.global_batch_size = SIZE * MICRO_BATCHES * ranks
    return config


def _parts() -> tuple[Any, Any]:
    """A data loader and a tokenizer, which are not in torchtitan's wheel."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Drawn(BaseDataLoader):
        """`batches`."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """Nothing to set."""

        def __init__(
            self, config: Any, *, dp_rank: int, local_batch_size: int, **others: Any
        ) -> None:
            self.rank, self.size = dp_rank, local_batch_size

        def __iter__(self) -> Any:
            return batches(self.rank, self.size)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class Words(BaseTokenizer):
        """Is built and never asked."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            """Nothing to set."""

        def __init__(self, config: Any, **others: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **options: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **options: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    return Drawn, Words
