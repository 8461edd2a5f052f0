"""Steps on a part of a job's ranks, and modules that were laid out on another, equal mesh."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import interlace
from interlace.config import OverlapConfig
from interlace.errors import InputError
from interlace.ranks.process_group import group_of_some

BOUND = 1e-12
"""Largest difference of a float64 gradient from one process, relative to its largest element."""
LAYOUT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def net(activation: type[nn.Module], *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(8, 16), activation(), nn.Linear(16, 8), *more]
    return nn.Sequential(*layers).double()


def squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def batches(count: int, seed: int = 3) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 8, generator=draw, dtype=torch.float64),) for _ in range(count)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error_of(
    module: nn.Module, plain: nn.Module, loss: Tensor, given: list[tuple[Tensor]]
) -> list[float]:
    """Relative differences of the loss and of each gradient from plain autograd on one process."""
    expected = torch.stack([squares(plain, *batch) for batch in given]).mean()
    expected.backward()
    wanted = expected.detach()
    errors = [float((loss.detach() - wanted).abs() / wanted.abs())]
    for (name, own), reference in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None, name
        assert reference.grad is not None, name
        difference = (whole(own.grad) - reference.grad).abs().max()
        errors.append(float(difference / reference.grad.abs().max()))
    return errors


def on_an_equal_mesh() -> list[float]:
    """Laid out on one mesh, compiled on another one of the same ranks."""
    first, second = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp")) for _ in range(2)
    )
    module = parallelize_module(net(nn.GELU), first["tp"], LAYOUT)
    step = interlace.compile_step(module, squares, batches(1)[0], mesh=second)
    every = batches(4)
    replica = second.get_local_rank("dp_replicate")
    loss = step(every[2 * replica : 2 * replica + 2]).detach()
    dist.all_reduce(loss, group=second.get_group("dp_replicate"))
    return error_of(module, net(nn.GELU), loss / 2, every)


def half_and_half() -> list[float]:
    """Two ranks train one model by tensor parallelism, the other two another one as replicas: the
    meshes are of one and of two axes, and no step knows of the other."""
    first = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    second = DeviceMesh("cpu", [[2], [3]], mesh_dim_names=("dp_replicate", "tp"))
    if dist.get_rank() < 2:
        module = parallelize_module(net(nn.GELU), first, LAYOUT)
        step = interlace.compile_step(module, squares, batches(1)[0], mesh=first)
        loss = step(batches(2))
        timeline = step.record(batches(2))
        assert timeline.spans
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)  # both steps have added theirs
        return error_of(module, net(nn.GELU), loss, batches(2))
    module = net(nn.Tanh, nn.LayerNorm(8))
    step = interlace.compile_step(module, squares, batches(1)[0], mesh=second)
    every, replica = batches(6), second.get_local_rank("dp_replicate")
    loss = step(every[3 * replica : 3 * replica + 3]).detach()
    dist.all_reduce(loss, group=second.get_group("dp_replicate"))
    step.check_ranks()
    return error_of(module, net(nn.Tanh, nn.LayerNorm(8)), loss / 2, every)


class DealsOut(nn.Module):
    """Lays its input out over ranks in every forward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.inner = parallelize_module(nn.Linear(8, 8).double(), mesh, ColwiseParallel())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(distribute_tensor(x, self.mesh, [Replicate()]))


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except InputError as error:
        return f"{error.message}\n{error.hint}"
    return "not refused"


def refusals() -> dict[str, str]:
    all_four = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    middle = DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))

    def compile_on(mesh: DeviceMesh | None, laid_out: DeviceMesh, **more: Any) -> str:
        module = parallelize_module(net(nn.GELU), laid_out, LAYOUT)
        example = batches(1)[0]
        return refusal(lambda: interlace.compile_step(module, squares, example, mesh=mesh, **more))

    found = {
        "none": compile_on(None, all_four),
        "other axis": compile_on(pairs["dp_replicate"], pairs["tp"]),
        "auto": compile_on(pairs["tp"], pairs["tp"], overlap=OverlapConfig(decompose="auto")),
        "distribute_tensor": refusal(
            lambda: interlace.compile_step(
                DealsOut(all_four), squares, batches(1)[0], mesh=all_four
            )
        ),
    }
    if dist.get_rank() in (0, 3):
        plain = net(nn.GELU)
        found["elsewhere"] = refusal(
            lambda: interlace.compile_step(plain, squares, batches(1)[0], mesh=middle)
        )
    return found


def groups_of_some() -> list[float]:
    """Sums over the ranks of two groups that a half made of itself (the other half made one), and
    over those of a group that all made afterwards."""
    rank, found = dist.get_rank(), []
    half = [0, 1] if rank < 2 else [2, 3]
    groups = [group_of_some(half) for _ in range(2 if rank < 2 else 1)]
    groups.append(dist.new_group([3, 2, 1, 0]))
    assert len({group.group_name for group in groups}) == len(groups)
    for group in groups:
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        found.append(float(total))
    return found


def child() -> dict[str, Any]:
    with gloo_group(60):
        return {
            "equal": on_an_equal_mesh(),
            "halves": half_and_half(),
            "groups": groups_of_some(),
            "refused": refusals(),
        }


def test_a_step_belongs_to_the_ranks_of_its_mesh() -> None:
    """Gradients are those of one process for a model that was laid out on another, equal mesh, and
    for two models that are compiled and run at the same time by halves of a job; what does not fit
    is refused with the arguments of compile_step."""
    results = [each.value for each in run_ranks("test_part_of_a_job:child", 4, timeout_s=120)]
    for found in results:
        assert max(found["equal"]) < BOUND, found
        assert max(found["halves"]) < BOUND, found
        said = found["refused"]
        assert "between ranks 0, 1, 2, 3 (all_reduce), and no mesh is given" in said["none"]
        assert "compile_step(mesh=...)" in said["none"]
        assert "those of no axis of the mesh: dp_replicate of ranks" in said["other axis"]
        assert "the mesh has 2 of them" in said["auto"]
        assert "test_part_of_a_job.py" in said["distribute_tensor"]
        assert "DTensor.from_local" in said["distribute_tensor"]
    assert [found["groups"] for found in results] == [[1, 1, 6], [1, 1, 6], [5, 6], [5, 6]]
    for rank in (0, 3):
        assert (
            f"rank {rank} has no part in the mesh, whose ranks are 1, 2"
            in (results[rank]["refused"]["elsewhere"])
        )
