"""`compile_step` on modules under `DistributedDataParallel`, against that wrapper's own loop."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError, InterlaceError, RunError

QUICK = PlanConfig(cluster="h100")
BATCHES, STEPS = 3, 3
BOUND = 1e-12
"""Largest difference of losses, gradients and weights in float64: sums are rounded elsewhere."""
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Has a tied, a frozen and an unused weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(17, 8)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.mlp[0].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("temperature", torch.tensor(0.9))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return (x + self.mlp(self.norm(x))) @ self.tokens.weight.T * self.temperature


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def batches(step: int) -> list[Batch]:
    """Micro-batches of this rank's own."""
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    drawn = torch.randint(0, 17, (BATCHES, 2, 3, 5), generator=draw)
    return [(tokens, labels) for tokens, labels in drawn]


def wrapped(**options: Any) -> DistributedDataParallel:
    finds = not options.get("static_graph", False)
    return DistributedDataParallel(Model(), find_unused_parameters=finds, **options)


def eager(model: DistributedDataParallel, given: list[Batch]) -> Tensor:
    """The mean loss; all backwards but the last are under no_sync."""
    losses = []
    for number, batch in enumerate(given, 1):
        with nullcontext() if number == len(given) else model.no_sync():
            loss = loss_of(model, *batch) / len(given)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


Train = Callable[[DistributedDataParallel, list[Batch]], Tensor]


def trained(
    model: DistributedDataParallel, train: Train, between: Callable[[Any], object] | None = None
) -> list[Tensor]:
    """Losses, gradients and weights of every step."""
    optimizer, found = AdamW(model.parameters(), lr=0.01), []
    for step in range(STEPS):
        found.append(train(model, batches(step)))
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
        if between is not None:
            between(model.module)
    return found


def compiled(model: DistributedDataParallel, **options: Any) -> Any:
    return interlace.compile_step(model, loss_of, batches(0)[0], config=QUICK, **options)


def _only(step: interlace.Step, model: DistributedDataParallel, given: list[Batch]) -> Tensor:
    return step(given)


def off(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def moved(module: Model) -> None:
    """Each rank changes its own buffer."""
    module.temperature.fill_(0.5 + 0.2 * dist.get_rank())


def mixed(model: DistributedDataParallel, given: list[Batch], step: Any) -> Tensor:
    """Gradients of our step and of the wrapper's are added up, in this order and in the other."""
    first = step(given) if step is not None else eager(model, given)
    second = eager(model, given[:1])
    third = step(given) if step is not None else eager(model, given)
    return torch.stack([first, second, third])


@contextmanager
def refused(found: list[str], kind: type[InterlaceError] = InputError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    found.append(f"{caught.value.message} hint: {caught.value.hint}")


def refusals() -> list[str]:
    """What a module or a call is refused with."""
    told: list[str] = []
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "tp"))
    for name in ("dp", "pp"):
        with refused(told):
            compiled(wrapped(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=(name,)))
    with refused(told):
        compiled(nn.Sequential(wrapped()), mesh=mesh)
    split = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    with refused(told):
        compiled(DistributedDataParallel(split, device_mesh=mesh["dp_replicate"]), mesh=mesh)
    hooked, part = wrapped(), Model()
    hooked.register_comm_hook(None, fp16_compress_hook)
    part._ddp_params_and_buffers_to_ignore = ["norm.weight"]
    for model in (hooked, DistributedDataParallel(part, find_unused_parameters=True)):
        with refused(told):
            compiled(model)
    step = compiled(model := wrapped(), mesh=mesh)
    with refused(told, RunError), model.no_sync():
        step(batches(0))
    with model.no_sync():
        loss_of(model, *batches(0)[0]).backward()
    with refused(told, RunError):
        step(batches(0))
    model.zero_grad()
    step(batches(0))
    with model.join(), refused(told, RunError):
        step(batches(0))
    return told


REFUSED = [
    "over the ranks [0, 1], and mesh, with the axes dp, over [",
    "the step is a pipeline",
    "hint: put the wrapper around the whole module, or leave",
    "with tensor parallelism in it (device_mesh)",
    "with a communication hook",
    "with parameters or buffers that it ignores or delays",
    "was called under no_sync()",
    "may hold gradients that nobody has averaged",
    "got join() after the step was compiled",
]


def accelerated() -> float:
    """A loop of Accelerate: how far the weights are from those of its own backward."""
    found = []
    for ours in (False, True):
        accelerator = Accelerator(cpu=True)
        plain = Model()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        model.find_unused_parameters = True
        assert isinstance(model, DistributedDataParallel)
        step = compiled(model) if ours else None
        for number in range(2):
            given = batches(number)
            if step is not None:
                step(given)
            for batch in () if ours else given:
                with accelerator.no_sync(model) if batch is not given[-1] else nullcontext():
                    loss = loss_of(model, *batch) + 0 * plain.unused.sum()
                    accelerator.backward(loss / len(given))
            optimizer.step()
            optimizer.zero_grad()
        found.append([each.detach() for each in plain.parameters()])
    return off(*found)


def two_ranks() -> dict[str, Any]:
    """How far each case is from DistributedDataParallel, and what is refused."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "one strand": {"strands": 1},
        "views of buckets": {"gradient_as_bucket_view": True, "static_graph": True},
        "buffers of their own": {"broadcast_buffers": False},
    }
    found: dict[str, Any] = {}
    with gloo_group(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        for name, case in cases.items():
            strands = case.pop("strands", 2)
            # The wrapper's own loop fails under no_sync with a static graph.
            wanted = trained(wrapped(**case | {"static_graph": False}), eager, moved)
            step = compiled(model := wrapped(**case), strands=strands)
            found[name] = off(trained(model, partial(_only, step), moved), wanted)
            if name == "plain":
                assert step.compare(batches(0), repeats=0).worst < BOUND
                step.check_ranks()
        wanted = trained(wrapped(), lambda model, given: mixed(model, given, None))
        step = compiled(model := wrapped())
        ours = trained(model, lambda _, given: mixed(model, given, step))
        found["both in turn"] = off(ours, wanted)
        found["accelerate"] = accelerated()
        found["refused"] = refusals()
    return found


def test_losses_gradients_and_weights_are_those_of_the_wrapper() -> None:
    """Several steps of several micro-batches, whose ranks see different data and change buffers;
    eager steps of the wrapper between ours; and what the wrapper does that a step does not."""
    for result in run_ranks("test_ddp:two_ranks", 2, timeout_s=120):
        told = result.value.pop("refused")
        assert len(told) == len(REFUSED)
        for text, wanted in zip(told, REFUSED, strict=True):
            assert wanted in text
        assert len(result.value) == 6
        assert all(each < BOUND for each in result.value.values()), result.value
