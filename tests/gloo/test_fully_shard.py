"""`compile_step` on modules under FSDP2's `fully_shard`, against FSDP2's own loop.

`make test` has each option of `fully_shard` once, one model of transformers, and replicas and
tensor parallelism beside it; wide are options together, depths and the other models.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError
from interlace.graphs.fsdp_exchange import keep_wide
from interlace.graphs.trace import trace_chunk
from wide import WIDE

QUICK = PlanConfig(cluster="h100", search="list")
VOCABULARY, WIDTH, BATCHES, STEPS = 33, 16, 3, 2
DEEP = 10
"""Blocks of which a few are traced and the others copied."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

ROUNDING = 1e-6
"""Of gradients of RMS norms in float32, whose operators autograd has in another order."""
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}  # fmt: skip
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES, **_NO_DROPOUT)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
}  # fmt: skip
LAYERS = {"llama": "layers", "bert": "encoder.layer", "gpt2": "h"}


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, 8)).permute(3, 0, 2, 1, 4)
        q, k, v = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks or more; 33 rows and a scale of one number cannot be cut evenly. The gradients of
    the last norm, which runs twice, and of the scale come in float32, of which the module itself
    rounds the second."""

    def __init__(self, vocabulary: int = VOCABULARY, *, tied: bool = False, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("temperature", torch.tensor(0.9))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.norm(x))) * self.scale.float() * self.temperature


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is put under `fully_shard`."""

    per_block: bool = True
    together: bool = False
    tied: bool = False
    frozen: bool = False
    axes: tuple[str, ...] = ("dp",)
    depth: int = 2
    strands: int = 2
    named_mesh: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


TWO_RANKS = {
    "blocks": Case(),
    "kept": Case(options={"reshard_after_forward": False}, named_mesh=True),
    "bf16": Case(options={"mp_policy": BF16}),
    "tied": Case(tied=True, per_block=False),
    "other dimension": Case(options={"shard_placement_fn": second_dimension}),
    "frozen": Case(frozen=True),
}
OTHERS = {
    "root": Case(per_block=False, strands=1),
    "bf16 with outputs in float32": Case(
        per_block=False,
        options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, None, torch.float32)},
    ),
    "list": Case(together=True),
    "deep": Case(depth=DEEP, options={"mp_policy": BF16}),
}
QUICK_MODELS = ("gpt2",)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    rows, whole = Shard(1), Replicate()
    ask = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        own = {
            "norm": SequenceParallel(),
            "qkv": ColwiseParallel(input_layouts=rows),
            "out": RowwiseParallel(output_layouts=rows),
            "mlp": ask,
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=rows),
        }
        parallelize_module(block, mesh, own)


def built(case: Case, mesh: DeviceMesh) -> Model:
    model = Model(34 if "tp" in case.axes else VOCABULARY, tied=case.tied, depth=case.depth)
    model.blocks[0].requires_grad_(not case.frozen)
    if "tp" in case.axes:
        tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    parts: list[Any] = list(model.blocks) if case.per_block else []
    parts += [[model.norm, model.head]] if case.together else []
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, **case.options)
    return model


def batches_of(seed: int, data_rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1000 * data_rank + seed)
    found = [torch.randint(0, VOCABULARY, (2, 9), generator=draw) for _ in range(BATCHES)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in found]


def eager(model: nn.Module, batches: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    losses = [loss_of(model, *batch) for batch in batches]
    for batch in batches:
        (loss_of(model, *batch) / len(batches)).backward()
    return losses


def local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def apart(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The largest difference; layouts and types are the same."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        if isinstance(one, DTensor):
            assert isinstance(other, DTensor)
            assert one.placements == other.placements
        a, b = local(one), local(other)
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.numel():
            assert torch.isfinite(a).all()
            largest = max(largest, float((a.detach() - b.detach()).abs().max()))
    return largest


def differences(case: Case, mesh: DeviceMesh, data_rank: int) -> dict[str, float]:
    """Between steps and FSDP2's own loop; the last step is FSDP2's for both."""
    ours, theirs = built(case, mesh), built(case, mesh)
    step = interlace.compile_step(
        ours, loss_of, batches_of(0, data_rank)[0], strands=case.strands, config=QUICK,
        mesh=mesh if case.named_mesh or "tp" in case.axes else None,
    )  # fmt: skip
    assert step.strands.not_repeated == ""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    far = dict.fromkeys(("loss", "gradient", "weight", "evaluated"), 0.0)
    for number in range(STEPS + 1):
        batches = batches_of(number, data_rank)
        with torch.no_grad():
            seen = [[loss_of(m, *batches[0])] for m in (ours, theirs)]
        theirs.reshard()
        far["evaluated"] = max(far["evaluated"], apart(*seen))
        if number < STEPS:
            mean = step(batches)
            losses = step.losses
            assert torch.allclose(mean, torch.stack(losses).mean())
        else:
            ours.reshard()
            losses = eager(ours, batches)
        far["loss"] = max(far["loss"], apart(losses, eager(theirs, batches)))
        gradients = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
        far["gradient"] = max(far["gradient"], apart(*gradients))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for on in {p.device_mesh for p in model.parameters()}:
                own = [p for p in model.parameters() if p.device_mesh == on]
                nn.utils.clip_grad_norm_(own, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        states = [list(m.state_dict().values()) for m in (ours, theirs)]
        far["weight"] = max(far["weight"], apart(*states))
    return far


def shown(step: interlace.Step) -> list[int]:
    """Collectives of a forward and of a backward."""
    return [len(step.strands.op_graphs[name].collectives) for name in ("forward", "backward")]


def small(mesh: DeviceMesh, **options: Any) -> Model:
    return built(Case(options=options), mesh)


def compiled(model: nn.Module, rank: int, **options: Any) -> interlace.Step:
    return interlace.compile_step(model, loss_of, batches_of(0, rank)[0], config=QUICK, **options)


def goes_on(mesh: DeviceMesh, rank: int) -> dict[str, bool]:
    """What else a user does with the module: it adds gradients up, loads weights into it in both
    ways, clips, compares, has weights left whole, compiles another step."""
    ours, theirs, batches = small(mesh), small(mesh), batches_of(0, rank)
    step, found = compiled(ours, rank), {}
    found["gathers and reductions"] = shown(step) == [3, 5]  # the root's weights stay whole

    def same() -> bool:
        gradients = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
        return apart(*gradients) == 0

    for _ in range(2):
        step(batches)
        eager(theirs, batches)
    found["added up"] = same()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(ours, get_model_state_dict(theirs, options=whole), options=whole)
    for parameter in (*ours.parameters(), *theirs.parameters()):
        parameter.grad = None
    ours.unshard()  # as a forward without backward leaves it
    step(batches)
    eager(theirs, batches)
    found["loaded"] = same()
    given = {name: each.clone() for name, each in theirs.state_dict().items()}
    ours.load_state_dict(given, assign=True)
    theirs.zero_grad()
    step(batches)
    eager(theirs, batches)
    found["assigned"] = same()
    having = [p.grad for p in ours.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(having).full_tensor()
    found["clipped"] = torch.allclose(interlace.clip_grad_norm_(step, 0.1).float(), norm)
    found["compared"] = compiled(ours, rank, strands=1).compare(batches, repeats=0).same_bits
    return found


def of_transformers(mesh: DeviceMesh, rank: int, names: Sequence[str]) -> dict[str, float]:
    """Largest differences of losses and of gradients, relative to the largest gradient, for
    unmodified models."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    def sharded(name: str) -> nn.Module:
        torch.manual_seed(1)
        model = MODELS[name]()
        for part in (*model.base_model.get_submodule(LAYERS[name]), model):
            fully_shard(part, mesh=mesh)
        return model

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    draw, far = torch.Generator().manual_seed(rank), {}
    batches = [(each,) for each in torch.randint(0, VOCABULARY, (BATCHES, 2, 9), generator=draw)]
    for name in names:
        ours, theirs = sharded(name), sharded(name)
        step = interlace.compile_step(ours, loss, batches[0], config=QUICK)
        step(batches)
        losses = [loss(theirs, *batch) for batch in batches]
        for batch in batches:
            (loss(theirs, *batch) / BATCHES).backward()
        gradients = [[p.grad for p in m.parameters()] for m in (ours, theirs)]
        scale = max(float(local(each).abs().max()) for each in gradients[1] if local(each).numel())
        far[name] = max(apart(step.losses, losses), apart(*gradients) / scale)
    return far


def masks_differ(mesh: DeviceMesh) -> bool:
    """Whether ranks that see other data draw other masks from the same seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    fully_shard(model, mesh=mesh)
    x = (torch.ones(2, 8),)
    step = interlace.compile_step(
        model, lambda m, x: (m(x).sum(), m(x).ne(0).float()), x, config=QUICK
    )
    step([x, x])
    own = step.results[0][0]
    both = own.clone()
    dist.all_reduce(both)
    return not torch.equal(own, both / mesh.size())


def refusals(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """What a module is refused with, by what is in the way."""
    several = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    offload = CPUOffloadPolicy(pin_memory=False)

    def unlike(model: Model) -> None:
        model.blocks[0].bfloat16()
        fully_shard(model, mesh=mesh)

    def factors(model: Model) -> None:
        fully_shard(model.blocks[0], mesh=mesh).set_gradient_divide_factor(3.0)
        fully_shard(model, mesh=mesh)

    ways: dict[str, tuple[Callable[[Model], object], dict[str, Any]]] = {
        "offload": (lambda m: fully_shard(m, mesh=mesh, offload_policy=offload), {}),
        "no sync": (lambda m: fully_shard(m, mesh=mesh).set_requires_gradient_sync(False), {}),
        "factor": (factors, {}),
        "outside": (lambda m: fully_shard(m.blocks[0], mesh=mesh), {}),
        "chunks": (lambda m: fully_shard(m, mesh=mesh), {"schedule": "folded"}),
        "types": (unlike, {}),
        "replicas": (lambda m: fully_shard(m, mesh=several["dp_shard"]), {"mesh": several}),
        "meta": (lambda m: fully_shard(m.to("meta"), mesh=mesh), {}),
    }
    found = {}
    for name, (lay_out, options) in ways.items():
        model = Model()
        lay_out(model)
        try:
            compiled(model, rank, **options)
        except InputError as error:
            found[name] = str(error)
    return found


def two_ranks(wide: bool) -> dict[str, Any]:
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rank = mesh.get_local_rank()
        cases = OTHERS if wide else TWO_RANKS
        names = [name for name in MODELS if (name not in QUICK_MODELS) is wide]
        found: dict[str, Any] = {
            "far": {name: differences(case, mesh, rank) for name, case in cases.items()},
            "transformers": of_transformers(mesh, rank, names),
        }
        if not wide:
            found["goes on"] = goes_on(mesh, rank)
            found["masks"] = masks_differ(mesh)
            found["refused"] = refusals(mesh, rank)
        return found


REFUSED = {
    "offload": "CPUOffloadPolicy",
    "no sync": "reduce_grads = False",
    "factor": "unlike gradient_divide_factors: 3.0, None",
    "outside": "is under no fully_shard",
    "chunks": "cuts it into chunks",
    "types": "fully_shard refuses the module",
    "replicas": "axis dp_replicate of 2 ranks",
    "meta": "materialized from meta device",
}


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=WIDE)])
def test_losses_gradients_and_weights_of_two_ranks(wide: bool) -> None:
    for result in run_ranks("test_fully_shard:two_ranks", 2, args=[wide], timeout_s=180):
        for name, far in result.value["far"].items():
            assert set(far.values()) == {0.0}, (name, far)
        for name, far in result.value["transformers"].items():
            assert far < ROUNDING if name == "llama" else far == 0, name
        if not wide:
            assert all(result.value["goes on"].values()), result.value["goes on"]
            assert result.value["masks"]
            assert result.value["refused"].keys() == REFUSED.keys()
            for name, part in REFUSED.items():
                assert part in result.value["refused"][name]


FOUR_RANKS = {
    "replicas": Case(axes=("dp_replicate", "dp_shard"), named_mesh=True),
    "tensor parallel, bf16": Case(axes=("dp", "tp"), options={"mp_policy": BF16}),
    "tensor parallel": Case(axes=("dp", "tp")),
}


def four_ranks(names: list[str]) -> dict[str, Any]:
    with gloo_group():
        found = {}
        for name, case in ((name, FOUR_RANKS[name]) for name in names):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=case.axes)
            data_rank = mesh["dp"].get_local_rank() if "tp" in case.axes else mesh.get_rank()
            found[name] = differences(case, mesh, data_rank)
        return found


@pytest.mark.parametrize(
    "names",
    [["replicas", "tensor parallel, bf16"], pytest.param(["tensor parallel"], marks=WIDE)],
    ids=", ".join,
)
def test_four_ranks(names: list[str]) -> None:
    """Replicas of shards, and tensor parallelism under them."""
    for result in run_ranks("test_fully_shard:four_ranks", 4, args=[names], timeout_s=240):
        assert list(result.value) == names
        for name, far in result.value.items():
            assert set(far.values()) == {0.0}, (name, far)


def one_rank() -> dict[str, Any]:
    with gloo_group():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        cases = (Case(), Case(options={"mp_policy": BF16}))
        far = [differences(case, mesh, 0) for case in cases]
        return {"far": far, "collectives": shown(compiled(small(mesh), 0))}


def test_a_mesh_of_one_rank() -> None:
    (result,) = run_ranks("test_fully_shard:one_rank", 1, timeout_s=120)
    assert [set(far.values()) for far in result.value["far"]] == [{0.0}, {0.0}]
    assert result.value["collectives"] == [0, 0]


class ReadsTwice(nn.Module):
    """One weight, whose gradients come in bfloat16 and in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).float().sum() + (x.float() * self.weight).sum()


def test_gradients_of_several_types_are_refused() -> None:
    """Of a weight that is read several times, where they are not rounded to its type."""
    chunk = trace_chunk(ReadsTwice(), (torch.ones(3, 4, dtype=torch.bfloat16),))
    keep_wide(chunk, ())
    with pytest.raises(InputError, match="'weight' is under fully_shard and read several times"):
        keep_wide(chunk, chunk.parameters)
