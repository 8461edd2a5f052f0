"""What a CUDA graph cannot hold is refused by name, without a GPU: tensors of one are pretended.

That captured steps have the bits of others is shown in tests/gpu/test_captured_cuda.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.graphs.group_axes import axes_of_groups
from interlace.graphs.trace import Binding, StrandGraph
from interlace.model_config import ExpertsConfig
from interlace.rules import check
from interlace.runtime.cuda_graph import refuse_capture

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
CAPTURED = RunConfig(train=TrainConfig(cuda_graph=True))


def graph_of(*calls: tuple[Any, tuple[Any, ...], str]) -> StrandGraph:
    """A graph of these operators; numbers among arguments are earlier nodes, and the last word is
    the device on which a value lies. Node 0 is an input on the GPU."""
    with FakeTensorMode():
        graph = fx.Graph()
        nodes = [graph.placeholder("x")]
        nodes[0].meta["val"] = torch.empty(4, device="cuda")
        for target, args, device in calls:
            given = tuple(nodes[each] if isinstance(each, int) else each for each in args)
            add = graph.placeholder if isinstance(target, str) else graph.call_function
            node = add(target) if isinstance(target, str) else add(target, given)
            node.meta["val"] = torch.empty(4, device=device)
            nodes.append(node)
        graph.output(nodes[-1])
    bindings = {"x": Binding("batch", "0"), "seeds": Binding("batch", "1")}
    return StrandGraph("forward", fx.GraphModule(nn.Module(), graph), bindings)


def refused(*calls: tuple[Any, tuple[Any, ...], str], is_pipeline: bool = False) -> str:
    with pytest.raises(InputError) as raised:
        refuse_capture({"forward": graph_of(*calls)}, GPU, is_pipeline=is_pipeline)
    return str(raised.value)


def test_numbers_that_the_host_reads() -> None:
    assert "seeds cannot be captured: the host reads it" in refused(("seeds", (), "cpu"))
    assert "waits for a value of the device" in refused((aten.abs.default, (0,), "cpu"))
    assert "stages of a pipeline" in refused(is_pipeline=True)


def test_constants_of_the_host_are_arguments_of_kernels() -> None:
    made = (aten.ones.default, ([4],), "cpu")
    calls = (made, (aten.mul.Tensor, (1, 1), "cpu"), (aten.mul.Tensor, (0, 2), "cuda"))
    refuse_capture({"forward": graph_of(*calls)}, GPU, is_pipeline=False)


def test_a_step_of_the_cpu() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"captures the kernels of a CUDA device.*runs on cpu"):
        interlace.compile_step(
            module, lambda m, x: m(x).sum(), (torch.ones(2, 4),), cuda_graph=True
        )


@pytest.mark.parametrize(
    ("name", "config"),
    {
        "strands": replace(CAPTURED, strands="eager"),
        "parallel.pipeline": replace(CAPTURED, parallel=ParallelConfig(pipeline=2)),
        "model.dropout": replace(CAPTURED, model=ModelConfig(dropout=0.1)),
        "model.experts.count": replace(
            CAPTURED,
            model=ModelConfig(architecture="moe", experts=ExpertsConfig(count=4, chosen=2)),
        ),
    }.items(),
)
def test_run_files(name: str, config: RunConfig) -> None:
    with pytest.raises(InputError, match=rf"cuda_graph captures planned steps.*{name}"):
        check(config)
    check(replace(config, train=TrainConfig()))


def gathers() -> str:
    """A rank: what is said of an all-gather, and of a sum, of device memory over gloo."""
    functional = torch.ops._c10d_functional
    with gloo_group():
        name = dist.group.WORLD.group_name
        sums = graph_of((functional.all_reduce.default, (0, "sum", name), "cuda"))
        axes_of_groups([sums.graph], {name: "tp"})
        gather = functional.all_gather_into_tensor.default
        graph = graph_of().graph
        source = next(iter(graph.nodes))
        with graph.inserting_after(source):
            node = graph.call_function(gather, (source, 1, name))
        node.meta["val"] = source.meta["val"]
        with pytest.raises(InputError) as raised:
            axes_of_groups([graph], {name: "tp"})
        return str(raised.value)


def test_gloo_and_the_memory_of_a_gpu() -> None:
    (result,) = run_ranks("test_cuda_graph:gathers", 1, args=[])
    assert "gloo is to send what is in the memory of a GPU (all_gather)" in result.value
    assert "cuda:nccl" in result.value
