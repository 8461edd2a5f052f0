"""Proves, without a GPU, the order in which a rank on CUDA starts: deterministic kernels, its own
device, then the process group; and what it refuses before NCCL is used.

torch's calls are replaced by ones that are written down.
"""

import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from interlace.bench.imagined import preset_for
from interlace.config import LinkConfig, RunConfig
from interlace.errors import InputError
from interlace.ranks import process_group as joined
from interlace.ranks.determinism import (
    check_current,
    nondeterminism,
    switch_adds,
    warn_of_other_bits,
)
from interlace.ranks.device import NCCL_TIMEOUT, check_device, limit_waits, local_device
from interlace.ranks.process_group import process_group
from interlace.ranks.small_collectives import collective_device
from interlace.runtime.stage_link import StageLink

Calls = list[tuple[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Four GPUs on this host, and a process group that is only pretended: of one rank, since more
    would be watched."""
    made: Calls = []

    def noted(name: str, answer: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((name, (args, kwargs)))
            return answer

        return call

    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", noted("set_device"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", noted("deterministic"))
    monkeypatch.setattr(joined, "meet", lambda *_: (dist.HashStore(), 0, 1))
    monkeypatch.setattr(dist, "init_process_group", noted("init_process_group"))
    monkeypatch.setattr(dist, "destroy_process_group", noted("destroy_process_group"))
    return made


def test_a_rank_has_its_own_gpu_and_determinism_before_any_group(calls: Calls) -> None:
    """NCCL takes the current device, and reads NCCL_ALGO when a group is made."""
    with process_group():
        calls.append(("work", (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"])))
    assert [name for name, _ in calls] == [
        "deterministic",
        "set_device",
        "init_process_group",
        "work",
        "destroy_process_group",
    ]
    assert calls[0][1] == ((True,), {})
    assert calls[1][1][0] == (torch.device("cuda", 2),)
    assert calls[2][1][0] == ("cpu:gloo,cuda:nccl",)
    assert calls[2][1][1]["timeout"].total_seconds() == 600
    assert calls[3][1] == (":4096:8", "^NVLS,NVLSTree")


def test_what_the_user_set_is_kept_and_speed_may_be_chosen(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process_group(deterministic=False):
        assert "NCCL_ALGO" not in os.environ
    assert calls[0][0] == "set_device"
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with process_group():
        assert os.environ["NCCL_ALGO"] == "Ring"


def test_an_emulated_link_is_still_refused_on_a_gpu(calls: Calls) -> None:
    config = RunConfig(link=LinkConfig(rate="1gbit"))
    with pytest.raises(InputError, match="this machine has a GPU"), process_group(config.link):
        pass
    assert "init_process_group" not in dict(calls)


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"), [(4, "3", 3), (1, "3", 0), (4, None, 0), (4, "5", 1)]
)
def test_the_gpu_follows_from_the_number_of_the_rank_on_its_host(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    local_rank: str | None,
    index: int,
) -> None:
    """A launcher may show each process one GPU only; ranks that are too many are refused later."""
    assert not calls
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK")
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert local_device() == torch.device("cuda", index)


def refusal(
    uuids: list[str], local_ranks: list[str], algorithms: str, hosts: list[str]
) -> list[str]:
    """A child: what `check_device` says on a rank of a pretended NCCL world; its small collectives
    really run, on gloo. `hosts` are names that ranks give NCCL for theirs, if any."""
    rank = int(os.environ["RANK"])
    if hosts:
        os.environ["NCCL_HOSTID"] = hosts[rank]
    os.environ["LOCAL_RANK"] = local_ranks[rank]
    os.environ["NCCL_ALGO"] = algorithms
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.device_count = lambda: 2  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=uuids[rank])  # type: ignore[assignment]
    dist.get_backend_config = lambda _=None: "cpu:gloo,cuda:nccl"  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True)
    with gloo_group():
        try:
            check_device(torch.device("cuda", 0), deterministic=True)
        except InputError as error:
            return [error.message, error.hint]
        mesh = init_device_mesh("cpu", (2,))
        limit_waits(mesh.get_all_groups())
        backend = mesh.get_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == NCCL_TIMEOUT
    return []


@pytest.mark.parametrize(
    ("uuids", "local_ranks", "algorithms", "hosts", "message"),
    [
        (["GPU-a", "GPU-b"], ["0", "0"], "^NVLS", [], None),
        (["GPU-a", "GPU-a"], ["0", "0"], "^NVLS", [], "ranks 0 and 1 use the same GPU, GPU-a"),
        (["GPU-a", "GPU-a"], ["0", "0"], "^NVLS", ["x", "x"], "ranks 0 and 1 use the same GPU, GP"),
        (["GPU-a", "GPU-a"], ["0", "0"], "^NVLS", ["x", "y"], None),
        (["GPU-a", "GPU-b"], ["2", "2"], "Ring", [], "local rank 2 has no GPU: this host has 2"),
        (["GPU-a", "GPU-b"], ["0", "1"], "NVLS,Ring", [], "train.deterministic is set, but NCCL_"),
    ],
)
def test_a_shared_gpu_and_a_switch_that_adds_are_refused_by_all_ranks(
    uuids: list[str],
    local_ranks: list[str],
    algorithms: str,
    hosts: list[str],
    message: str | None,
) -> None:
    results = run_ranks("test_cuda_start:refusal", 2, args=[uuids, local_ranks, algorithms, hosts])
    for result in results:
        assert bool(result.value) is (message is not None)
        assert message is None or result.value[0].startswith(message)


def stages_on_a_gpu() -> str:
    """A child: what a pipeline says whose stages are on a GPU, and whose ranks have gloo alone."""
    with gloo_group():
        world = dist.group.WORLD
        assert world is not None
        try:
            StageLink(world, torch.device("cuda", 0))
        except InputError as error:
            return f"{error.message}\n{error.hint}"
    return ""


def test_gloo_sends_no_stage_of_a_gpu() -> None:
    """It would take the GPU's memory for the host's."""
    (result,) = run_ranks("test_cuda_start:stages_on_a_gpu", 1)
    assert result.value == (
        "the stages are on cuda:0, and gloo is to send between them\n"
        'init_process_group("cpu:gloo,cuda:nccl") takes NCCL for that'
    )


def test_small_agreements_stay_on_the_cpu_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend, device in {
        "cpu:gloo,cuda:nccl": torch.device("cpu"),
        "cpu:gloo,cuda:gloo": torch.device("cpu"),
        "cuda:nccl": torch.device("cuda", 3),
    }.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda _=None, found=backend: found)
        assert collective_device() == device


@pytest.mark.parametrize(
    ("algorithms", "adds"),
    [
        ("", True),
        ("^NVLS", False),
        ("^nvls, NVLSTree", False),
        ("^Tree", True),
        ("Ring,Tree", False),
        ("NVLSTree,Ring", True),
        ("allreduce:ring", True),
        ("allreduce:ring;reducescatter:^nvls", False),
        ("ring;broadcast:nvls", False),
    ],
)
def test_values_of_nccl_algo_with_which_the_switch_adds(algorithms: str, adds: bool) -> None:
    assert switch_adds(algorithms) is adds


def test_a_step_knows_why_its_bits_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they do not; on CUDA with kernels, cuBLAS and NCCL all settled neither. torch sets
    NCCL_ALGO in the environment of C, which `os.environ` does not show."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    deterministic = [False]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic[0])
    assert nondeterminism(torch.device("cpu")) == ()
    reasons = nondeterminism(cuda)
    for word, reason in zip(("algorithms", "CUBLAS", "NCCL_ALGO="), reasons, strict=True):
        assert word in reason
    with pytest.warns(UserWarning, match="one strand and two may differ"):
        warn_of_other_bits(reasons)
    deterministic[0] = True
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert len(nondeterminism(cuda)) == 1
    ctypes.CDLL(None).setenv(b"NCCL_ALGO", b"^NVLS", 1)
    assert nondeterminism(cuda) == ()
    warn_of_other_bits(())  # warnings are errors: none


def test_inputs_on_another_gpu_than_the_current_one_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cpu"))
    check_current(torch.device("cuda", 0))
    with pytest.raises(InputError, match=r"on cuda:1, and the current device is cuda:0") as caught:
        check_current(torch.device("cuda", 1))
    assert "torch.cuda.set_device(1) before" in caught.value.hint


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA RTX A4000", "a800"),
    ],
)
def test_the_imagined_bench_takes_the_links_of_the_gpu(gpu: str, preset: str) -> None:
    assert preset_for(gpu) == preset
