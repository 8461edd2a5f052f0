"""`plan.cluster`: times are those of a description, and nothing is measured at start-up."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_compile_step import example, gradients_of, images, mixer, near, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interlace
from interlace.config import OverlapConfig, PlanConfig
from interlace.errors import InputError
from interlace.graphs.torch_private import init_fake_world
from interlace.runtime.mesh_axes import rank_groups
from interlace.step import Step

DESCRIBED, MEASURED = PlanConfig(cluster="a800"), PlanConfig(cache=False, profile_repeats=1)


def compiled(model: torch.nn.Module, mesh: DeviceMesh | None, **options: Any) -> Step:
    return interlace.compile_step(model, example().loss_fn, images()[0], mesh=mesh, **options)


def unmeasured() -> ExitStack:
    """Fails where something is measured."""
    stack = ExitStack()
    for what in ("compiled.profile_strands", "measure.site_times.MeasuredTimes"):
        wrong = AssertionError(f"{what} was called")
        stack.enter_context(mock.patch(f"interlace.{what}", side_effect=wrong))
    return stack


def run() -> dict[str, Any]:
    """A child: the same step by measured and by described times, also with collectives cut."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def seen(**options: Any) -> dict[str, torch.Tensor]:
            model = mixer()
            example().split(model, mesh)
            step = compiled(model, mesh, **options)
            return {"loss": step(images()), **gradients_of(model)}

        measured = seen(config=MEASURED)
        with unmeasured():
            described = seen(config=DESCRIBED)
            cut = seen(config=DESCRIBED, overlap=OverlapConfig(decompose="auto"))
        return {
            "same": same(measured, described),
            "near": near(measured, cut),
        }


def test_a_described_cluster_takes_the_place_of_measurements() -> None:
    """On two ranks, with the bits of a step that measured. What is cut into sends follows from
    the description as well."""
    for result in run_ranks("test_plan_cluster:run", 2, timeout_s=120):
        assert result.value["same"]
        assert result.value["near"]


def test_one_process_needs_no_links() -> None:
    step = compiled(mixer(), None, config=DESCRIBED)
    assert torch.isfinite(step(images()))


def test_a_cluster_that_there_is_not() -> None:
    with pytest.raises(InputError, match="there is no cluster 'a80'") as found:
        compiled(mixer(), None, config=PlanConfig(cluster="a80"))
    assert "a800" in found.value.hint


def test_the_groups_of_each_axis() -> None:
    init_fake_world(4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
        assert rank_groups(mesh) == {"dp_replicate": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
        assert rank_groups(mesh["dp_replicate"]) == {"dp_replicate": [(0, 2)]}
        assert rank_groups(None) == {}
    finally:
        dist.destroy_process_group()


def test_axes_of_one_rank_have_groups_of_their_own() -> None:
    """torch gives such axes one process group, so a group is no name for an axis."""
    init_fake_world(1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "tp"))
        assert rank_groups(mesh) == {"dp_replicate": [(0,)], "tp": [(0,)]}
    finally:
        dist.destroy_process_group()
