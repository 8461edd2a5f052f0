"""Stages that are laid out each in its own way, on models that were not written for it, and what is
refused: before the first step where graphs tell, else in it, on all ranks alike.

Wide is a U-Transformer, a second model; `test_u_transformer.py` has its skips between stages."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gloo_group, run_ranks
from test_stage_layouts import (
    BOUND,
    QUICK,
    Skipping,
    built,
    laid_out,
    loss_of,
    meshes_of,
    own_mesh,
    rows_of,
    whole,
    whole_batches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from traced_once import traced_once
from transformers import LlamaConfig, LlamaForCausalLM

import interlace
from interlace.data.digits import DigitsUnderNoise
from interlace.errors import InterlaceError
from interlace.models.u_transformer import UTransformer, preset
from wide import WIDE


def llama() -> nn.Module:
    """An unmodified Llama of transformers."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def cut_llama(module: nn.Module, mesh: DeviceMesh) -> None:
    """The published plan of transformers for tensor parallelism, by PyTorch's styles."""
    plan: dict[str, Any] = {}
    for index in range(3):
        at = f"model.layers.{index}"
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        plan |= {f"{at}.{name}": ColwiseParallel() for name in names}
        plan |= {f"{at}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {f"{at}.self_attn.o_proj": RowwiseParallel()}
        plan |= {f"{at}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(module, mesh, plan)


def next_token(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = module(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(9)
    return [
        (torch.randint(40, (4, 8), generator=draw), torch.randint(40, (4, 8), generator=draw))
        for _ in range(3)
    ]


def u_transformer() -> nn.Module:
    torch.manual_seed(3)
    return UTransformer(preset("small")).double()


def noise_loss(module: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, targets = batch
    return nn.functional.mse_loss(module(*inputs), targets)


def digits() -> list[tuple[Tensor, ...]]:
    return [
        tuple(each.double() for each in batch)
        for batch in DigitsUnderNoise().micro_batches(0, count=2, size=4)
    ]


def against_eager(
    make: Callable[[], nn.Module],
    loss_fn: Callable[..., Tensor],
    batches: list[tuple[Tensor, ...]],
    layout: list[dict[str, int]],
    schedule: str,
    split_at: tuple[str, ...],
) -> dict[str, Any]:
    """Errors of losses and gradients, and what a recorded step says."""
    twin, total = make(), 0.0
    for batch in batches:
        loss = loss_fn(twin, *batch) / len(batches)
        loss.backward()
        total += float(loss.detach())
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    meshes = meshes_of(layout)
    mesh = own_mesh(meshes)
    module = make()
    names = mesh.mesh_dim_names or ()
    if "tp" in names and mesh["tp"].size() > 1:
        cut_llama(module, mesh["tp"])
    if "dp_replicate" in names:
        data = mesh["dp_replicate"]
        batches = [
            tuple(t.chunk(data.size())[data.get_local_rank()] for t in batch) for batch in batches
        ]
    step = interlace.compile_step(
        module, loss_fn, batches[0], stages=meshes, schedule=schedule, split_at=split_at,
        config=QUICK,
    )  # fmt: skip
    found = float(step(batches).detach())
    largest = max(float(g.abs().max()) for g in expected.values())
    own = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    errors = [float((own[n] - expected[n]).abs().max()) / largest for n in own]
    record = step.record_pipeline(batches)
    return {
        "own": sorted(own),
        "all": sorted(expected),
        "error": max([*errors, abs(found - total)]),
        "summary": record.summary(),
    }


def of_others(name: str) -> dict[str, Any]:
    """A Llama of transformers or a U-Transformer, whose skips cross."""
    with gloo_group(60):
        if name == "llama":
            return against_eager(
                llama, next_token, texts(), [{"tp": 2}, {"dp_replicate": 2}], "zb_v", ()
            )
        return against_eager(
            u_transformer, noise_loss, digits(), [{"dp_replicate": 2}, {"dp_replicate": 2}],
            "one_f_one_b", ("up.0",),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", pytest.param("U-Transformer", marks=WIDE)])
def test_models_of_others_and_skips_between_stages(name: str) -> None:
    of_ranks = [
        result.value
        for result in run_ranks(
            "test_stage_layouts_models:of_others", 4, args=[name], timeout_s=200
        )
    ]
    assert {n for each in of_ranks for n in each["own"]} == set(of_ranks[0]["all"])
    assert max(each["error"] for each in of_ranks) < BOUND
    assert "predicted" in of_ranks[0]["summary"]


class Tied(Skipping):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head.weight = self.words.weight


class PositionsApart(Skipping):
    """Positions are computed in the first stage and read in the last one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.places = nn.Linear(1, self.head.in_features)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], dtype=self.places.weight.dtype).unsqueeze(-1)
        places = self.places(at)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x + places))


def _compiled(
    meshes: list[DeviceMesh], module: nn.Module | None = None, **options: Any
) -> interlace.Step:
    own = [mesh for mesh in meshes if dist.get_rank() in mesh.mesh.flatten().tolist()]
    mesh = own[0] if own else meshes[0]
    module = laid_out(built(4), mesh, False) if module is None else module
    batches = rows_of(mesh) if own else whole_batches()
    options = {"stages": meshes, "schedule": "one_f_one_b", "config": QUICK} | options
    return interlace.compile_step(module, loss_of, batches[0], **options)


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except InterlaceError as error:
        return f"{error.message} hint: {error.hint}"
    return "nothing"


def refusals() -> dict[str, str]:
    """What this rank is told, by case."""
    with gloo_group(60), traced_once():
        tp_dp = meshes_of([{"tp": 2}, {"dp_replicate": 2}])
        short = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)),
                 DeviceMesh("cpu", [2], mesh_dim_names=("tp",))]  # fmt: skip
        contexts = meshes_of([{"cp": 2}, {"cp": 1, "tp": 2}])
        torch.manual_seed(7)
        found = {
            "both": _said(lambda: _compiled(tp_dp, mesh=tp_dp[0])),
            "no schedule": _said(lambda: _compiled(tp_dp, schedule="")),
            "short": _said(lambda: _compiled(short, Skipping(4).double())),
            "context": _said(lambda: _compiled(contexts, Skipping(4).double())),
            "auto": _said(
                lambda: _compiled(tp_dp, overlap=interlace.config.OverlapConfig(decompose="auto"))
            ),
            "tied": _said(lambda: _compiled(tp_dp, Tied().double())),
            "positions": _said(lambda: _compiled(tp_dp, PositionsApart().double())),
            "few": _said(lambda: _compiled(tp_dp, schedule="interleaved(chunks=20)")),
        }
        step = _compiled(tp_dp)
        mesh = own_mesh(tp_dp)
        batches = rows_of(mesh)
        if "dp_replicate" in (mesh.mesh_dim_names or ()):
            own = mesh["dp_replicate"].get_local_rank()
            batches = [tuple(t[own::2] for t in batch) for batch in whole_batches()]
        found["rows"] = _said(lambda: step(batches))
        return found


def test_refusals_say_what_and_why() -> None:
    results = [result.value for result in run_ranks("test_stage_layouts_models:refusals", 4,
                                                    timeout_s=200)]  # fmt: skip
    words = {
        "both": "mesh and stages are both given",
        "no schedule": "2 stages, and no schedule is named",
        "short": "2 + 1 = 3 ranks, the job has 4, and rank 3 is in none",
        "context": "axis cp of 1, 2 ranks",
        "auto": "different graphs",
        "tied": "'words.weight' is used by stages 0, 1",
        "positions": "gradient of a value that does not depend on the sample",
        "few": "chunks",
        "rows": "tensor 0 of the first micro-batch is not the same for stages 0 and 1",
    }
    for case, text in words.items():
        for found in results:
            assert text in found[case], (case, found[case])


class Partial(nn.Module):
    """Ends its first half before the sum over `tp` that belongs to it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        tp = "tp" in (mesh.mesh_dim_names or ())
        self.factor = 1.0 + dist.get_rank() if tp else 3.0
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.factor).square().mean()


def partial() -> str:
    """What this rank is told in the first step."""
    with gloo_group(60):
        meshes = meshes_of([{"tp": 2}, {"dp_replicate": 2}])
        mesh = own_mesh(meshes)
        torch.manual_seed(1)
        x = torch.randn(4, 8)
        if "dp_replicate" in (mesh.mesh_dim_names or ()):
            x = x.chunk(2)[mesh["dp_replicate"].get_local_rank()]
        torch.manual_seed(1)
        module = Partial(mesh)
        step = interlace.compile_step(
            module, lambda m, x: m(x), (x,), stages=meshes, schedule="one_f_one_b",
            split_at=("second",), config=QUICK, wait_s=60,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _said(lambda: step([(x,), (x,)]))


def test_partial_sums_are_not_taken_for_copies() -> None:
    """By their shapes ranks of tp hold the same, and they do not."""
    results = [result.value for result in run_ranks("test_stage_layouts_models:partial", 4,
                                                    timeout_s=100)]  # fmt: skip
    assert all("differs between ranks 0 and 1, which by its shape hold the same" in each
               for each in results), results  # fmt: skip
