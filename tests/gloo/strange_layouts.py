"""Modules laid out over ranks as strangers lay them out: torchtitan's plans, `distribute_module`,
layers that meet split activations. A new one is a line in `CASES`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from strange_modules import Tied, double, llama, llama_loss, numbers, words
from strange_world import Case, call
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Layout = Callable[[nn.Module, DeviceMesh], object]


def plan(**styles: Any) -> Layout:
    """`parallelize_module` with these styles; in names `__` stands for a dot."""
    named = {name.replace("__", "."): style for name, style in styles.items()}
    return lambda module, mesh: parallelize_module(module, mesh, named)


def spread(**placements: Any) -> Layout:
    """`distribute_module` with these layouts of parameters, whole inputs and whole outputs."""

    def lay_out(module: nn.Module, mesh: DeviceMesh) -> None:
        def partition(name: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(owner.named_parameters(recurse=False)):
                layout = [placements.get(f"{name}.{key}" if name else key, Replicate())]
                owner.register_parameter(
                    key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, layout))
                )

        distribute_module(
            module,
            mesh,
            partition,
            lambda _, inputs, mesh: tuple(
                DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs
            ),
            lambda _, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
        )

    return lay_out


class Attention(nn.Module):
    """Of torchtitan's Llama, with norms of query and key heads as Qwen3 has them."""

    def __init__(self, heads: int = 2, size: int = 4, *, norms: bool = False) -> None:
        super().__init__()
        width = heads * size
        self.size, self.causal = size, not norms
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(size) if norms else nn.Identity()
        self.k_norm = nn.RMSNorm(size) if norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if isinstance(q, DTensor):  # on the CPU its fused attention knows no split heads
            attended = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, dim=-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, *, norms: bool = False) -> None:
        super().__init__()
        self.attention = Attention(norms=norms)
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(8)
        self.ffn_norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """The shape of torchtitan's Llama: names of sub-modules are theirs."""

    def __init__(self, *, norms: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(12, 8)
        self.layers = nn.ModuleDict({"0": Block(norms=norms)})
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def titan_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def titan_plan(*, sequence: bool = True, norms: bool = False) -> Layout:
    """The plan of torchtitan 0.3's Llama 3, with sequence parallelism or without."""

    def lay_out(module: nn.Module, mesh: DeviceMesh) -> None:
        split = Shard(1) if sequence else Replicate()
        outer: dict[str, Any] = {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=split, use_local_output=sequence
            ),
            "output": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
        }
        block: dict[str, Any] = {
            "attention": PrepareModuleInput(
                input_layouts=(split,), desired_input_layouts=(Replicate(),)
            ),
            "attention.wq": ColwiseParallel(use_local_output=not norms),
            "attention.wk": ColwiseParallel(use_local_output=not norms),
            "attention.wv": ColwiseParallel(use_local_output=not norms),
            "attention.wo": RowwiseParallel(output_layouts=split),
            "feed_forward": PrepareModuleInput(
                input_layouts=(split,), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=split),
            "feed_forward.w3": ColwiseParallel(),
        }
        if sequence:
            outer["norm"] = SequenceParallel()
            block["attention_norm"] = block["ffn_norm"] = SequenceParallel()
        else:
            outer["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate())
        if norms:
            block["attention.q_norm"] = block["attention.k_norm"] = SequenceParallel(sequence_dim=2)
        parallelize_module(module, mesh, outer)
        for layer in module.layers.values():
            parallelize_module(layer, mesh, block)

    return lay_out


class Gain(nn.Module):
    """A gain for each feature of the inner layer."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, inner)
        self.gain = nn.Parameter(torch.randn(inner))
        self.down = nn.Linear(inner, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gain)


def whole_gain(module: nn.Module, mesh: DeviceMesh) -> None:
    """The gain is whole on each rank and meets activations that are split by features."""
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(module, mesh, styles)
    gain = distribute_tensor(module.gain.detach(), mesh, [Replicate()])
    module.gain = nn.Parameter(gain)


class LocalScale(nn.Module):
    """Takes its DTensor parameter apart, as hand-written kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor):
            return x @ weight
        mesh = weight.device_mesh
        rank = mesh.get_local_rank()
        rows = x.shape[0] // mesh.size()
        local = weight.to_local(grad_placements=[Partial()])
        mine = x[rank * rows : (rank + 1) * rows] @ local
        return (
            DTensor.from_local(mine, mesh, [Shard(0)])
            .redistribute(placements=[Replicate()])
            .to_local()
        )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def sequential_plan(**arguments: Any) -> Layout:
    first = ColwiseParallel()
    return lambda module, mesh: parallelize_module(
        module, mesh, {"0": first, "2": RowwiseParallel(**arguments)}
    )


def tied_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Table and head are split by vocabulary, and are one parameter again."""
    styles = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, styles)
    module.head.weight = module.table.weight


def swapped(module: nn.Module) -> None:
    """The same weight in a new parameter, laid out as before."""
    old = module[0].weight
    module[0].weight = nn.Parameter(old.detach() * 0.5)


def frozen(make: Callable[[], nn.Module], name: str) -> Callable[[], nn.Module]:
    """The module with one parameter that does not learn."""

    def made() -> nn.Module:
        module = make()
        module.get_parameter(name).requires_grad_(False)
        return module

    return made


ROWS = numbers(4, 4)
CASES = [
    Case("torchtitan's Llama", double(Titan), words(2, 4), titan_loss, titan_plan()),
    Case("without sequence parallelism", double(Titan), words(2, 4), titan_loss,
         titan_plan(sequence=False)),
    Case("torchtitan's Qwen3", double(lambda: Titan(norms=True)), words(2, 4), titan_loss,
         titan_plan(norms=True)),
    Case("Qwen3 without sequence parallelism", double(lambda: Titan(norms=True)), words(2, 4),
         titan_loss, titan_plan(sequence=False, norms=True)),
    Case("Llama of transformers, by hand", lambda: llama(12), words(2, 4), llama_loss, plan(
        model__embed_tokens=RowwiseParallel(input_layouts=Replicate()),
        model__layers__0__mlp__gate_proj=ColwiseParallel(),
        model__layers__0__mlp__up_proj=ColwiseParallel(),
        model__layers__0__mlp__down_proj=RowwiseParallel(),
        lm_head=ColwiseParallel(output_layouts=Replicate()))),
    Case("table by rows, output split", double(lambda: nn.Embedding(6, 4)), words(2, 4, of=6),
         lay_out=lambda m, mesh: parallelize_module(m, mesh, RowwiseParallel(
             input_layouts=Replicate(), output_layouts=Replicate()))),
    Case("table by columns", double(lambda: nn.Embedding(6, 4)), words(2, 4, of=6),
         lay_out=lambda m, mesh: parallelize_module(m, mesh, ColwiseParallel(
             output_layouts=Replicate()))),
    Case("columns, then rows", double(mlp), ROWS, lay_out=sequential_plan()),
    Case("rows, output gathered from a split", double(mlp), ROWS, lay_out=lambda m, mesh: (
        sequential_plan(output_layouts=Shard(0), use_local_output=False)(m, mesh),
        parallelize_module(m, mesh, PrepareModuleOutput(
            output_layouts=Shard(0), desired_output_layouts=Replicate())))),
    Case("uneven parts", double(lambda: nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))), ROWS, lay_out=spread(
            **{"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}),
         refused="'0.weight' is cut"),
    Case("a part of nothing", double(lambda: nn.Linear(4, 1)), ROWS, lay_out=spread(
        weight=Shard(0), bias=Shard(0)), refused="'weight' is cut"),
    Case("whole gain, split features", double(lambda: Gain(6)), ROWS, lay_out=whole_gain),
    Case("whole gain, one feature a rank", double(lambda: Gain(2)), ROWS, lay_out=whole_gain),
    Case("distributed whole", double(mlp), ROWS, lay_out=spread()),
    Case("distributed by rows", double(mlp), ROWS, lay_out=spread(
        **{"0.weight": Shard(0), "2.weight": Shard(0)})),
    Case("distributed by columns", double(mlp), ROWS, lay_out=spread(
        **{"0.weight": Shard(1), "2.weight": Shard(1), "2.bias": Shard(0)})),
    Case("distributed norm", double(lambda: nn.LayerNorm(4)), ROWS, lay_out=spread(
        weight=Shard(0))),
    Case("distributed convolution", double(lambda: nn.Conv1d(4, 4, 3)), numbers(2, 4, 6),
         lay_out=spread()),
    Case("tied table and head", double(lambda: Tied(12)), words(2, 4), call, lay_out=tied_plan),
    Case("taken apart", double(LocalScale), ROWS, lay_out=lambda m, mesh: m.register_parameter(
        "weight", nn.Parameter(distribute_tensor(m.weight.detach(), mesh, [Replicate()])))),
    Case("frozen part", frozen(double(mlp), "0.weight"), ROWS, lay_out=sequential_plan()),
    Case("replaced part", double(mlp), ROWS, lay_out=sequential_plan(), change=swapped),
    Case("bfloat16 split", lambda: mlp().bfloat16(), lambda: (torch.randn(4, 4).bfloat16(),),
         lay_out=sequential_plan(), bound=2e-2),
]  # fmt: skip
