"""A step is bound to what it was compiled for: what changed since is taken over or refused.

Each change is made to a module with a compiled step. Either the step's loss and gradients are then
those of eager PyTorch on the changed module, or it is refused by the name of what changed; once
that is undone, the step is right again.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from processes import gloo_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize

import interlace
from interlace.config import PlanConfig
from interlace.errors import InputError, RunError

QUICK = PlanConfig(cluster="h100", search="list")
FACTOR = 1.0
WEIGHTS = torch.ones(4)


class Block(nn.Module):
    """Reads attributes, an element of a list, a field of an object, a class attribute, a plain
    tensor and a buffer."""

    shared = 1.0

    def __init__(self, options: SimpleNamespace, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=1e-3)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.register_buffer("table", table)
        self.mask = torch.ones(4)
        self.options = options
        self.factors = [1.0, 2.0]
        self.seen = 0  # nobody reads it

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.linear(x))) * self.scale * self.mask + self.table
        return x + y * self.options.gain * sum(self.factors) * self.shared * FACTOR * WEIGHTS


class Model(nn.Module):
    """Two blocks that share a table; a head whose weight is also that of the entry."""

    def __init__(self) -> None:
        super().__init__()
        table, options = torch.rand(4), SimpleNamespace(gain=1.5)
        self.entry = nn.Linear(4, 4, bias=False)
        self.blocks = nn.Sequential(Block(options, table), Block(options, table))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.entry.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.blocks(self.entry(x))))


class Loss(nn.Module):
    """A loss with a parameter, a buffer and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.power = 2.0

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        return ((model(x) + self.shift).abs() ** self.power * self.weight).mean()


class Case:
    """A module, its loss and a step that was compiled for both."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], strands: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.batches = [(torch.randn(3, 4, generator=generator),) for _ in range(2)]
        self.model, self.loss = model, loss
        self.step = interlace.compile_step(
            model, loss, self.batches[0], strands=strands, config=QUICK
        )

    def tensors(self) -> list[nn.Parameter]:
        own = list(self.loss.parameters()) if isinstance(self.loss, nn.Module) else []
        return [*self.model.parameters(), *own]

    def check(self) -> None:
        """The step gives what eager PyTorch gives for what there is now."""
        for parameter in self.tensors():
            parameter.grad = None
        found = self.step(self.batches)
        ours = [parameter.grad for parameter in self.tensors()]
        for parameter in self.tensors():
            parameter.grad = None
        wanted = sum(self.loss(self.model, *batch) for batch in self.batches) / len(self.batches)
        wanted.backward()
        torch.testing.assert_close(found, wanted.detach())
        assert [g is None for g in ours] == [p.grad is None for p in self.tensors()]
        for gradient, parameter in zip(ours, self.tensors(), strict=True):
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad)


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(5)
    return Case(Model(), Loss())


def assigned(case: Case) -> None:
    state = {name: torch.rand_like(value) for name, value in case.model.state_dict().items()}
    state["head.weight"] = state["entry.weight"] = nn.Parameter(state["entry.weight"])
    state["blocks.1.table"] = state["blocks.0.table"]
    case.model.load_state_dict(state, assign=True)


def tied_in_both_places(case: Case) -> None:
    case.model.entry.weight = case.model.head.weight = nn.Parameter(torch.rand(4, 4))


def new_parameter(case: Case) -> None:
    case.model.blocks[0].linear.weight = nn.Parameter(torch.rand(4, 4))


def new_frozen_parameter(case: Case) -> None:
    case.model.frozen.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)


def new_data(case: Case) -> None:
    for parameter in case.model.parameters():
        parameter.data = torch.rand_like(parameter)


def swapped_data(case: Case) -> None:
    one, other = case.model.blocks[0].linear.weight, case.model.blocks[1].linear.weight
    one.data, other.data = other.data, one.data


def swapped_parameters(case: Case) -> None:
    one, other = case.model.blocks[0].linear, case.model.blocks[1].linear
    one.bias, other.bias = other.bias, one.bias


def new_buffer(case: Case) -> None:
    block = case.model.blocks[0]
    block.scale = block.scale * 3


def new_shared_buffer(case: Case) -> None:
    case.model.blocks[0].table = case.model.blocks[1].table = torch.rand(4)


def buffer_in_place(case: Case) -> None:
    case.model.blocks[1].scale.mul_(2)


def tensor_in_place(case: Case) -> None:
    case.model.blocks[1].mask.mul_(2)


def parameters_of_the_loss(case: Case) -> None:
    case.loss.weight = nn.Parameter(torch.rand(4))
    case.loss.shift = torch.rand(4)


def attribute_that_nobody_reads(case: Case) -> None:
    case.model.blocks[0].seen += 1
    case.model.started = "today"


def equal_values(case: Case) -> None:
    block = case.model.blocks[0]
    block.factors, block.norm.eps = [1.0, 2.0], float("1e-3")


def hooks_that_are_gone(case: Case) -> None:
    case.model.blocks[0].register_forward_hook(lambda *_: None).remove()
    case.model.entry.weight.register_hook(lambda gradient: gradient).remove()


def another_mode_and_back(case: Case) -> None:
    case.model.eval().train()


TAKEN_OVER = [
    assigned,
    tied_in_both_places,
    new_parameter,
    new_frozen_parameter,
    new_data,
    swapped_data,
    swapped_parameters,
    new_buffer,
    new_shared_buffer,
    buffer_in_place,
    tensor_in_place,
    parameters_of_the_loss,
    attribute_that_nobody_reads,
    equal_values,
    hooks_that_are_gone,
    another_mode_and_back,
]


@pytest.mark.parametrize("change", TAKEN_OVER, ids=lambda change: change.__name__)
def test_taken_over(case: Case, change: Callable[[Case], None]) -> None:
    change(case)
    case.check()


@contextlib.contextmanager
def having(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; modules keep their dictionaries."""
    missing = object()
    before = getattr(owner, name) if name in dir(owner) else missing
    own = name in vars(owner) or not isinstance(owner, nn.Module) or name not in dir(type(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing or not own:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def parametrized(module: nn.Module) -> Iterator[None]:
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()


def weight(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape, **options))


def triple(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 3 * output


Change = Callable[[Case, Any], contextlib.AbstractContextManager[Any]]
REFUSED: dict[str, tuple[Change, str]] = {
    "another dtype": (
        lambda c, b: having(b.linear, "weight", weight(4, 4, dtype=torch.float64)),
        r"parameter 'blocks\.0\.linear\.weight' has dtype float64, and had float32",
    ),
    "another shape": (
        lambda c, b: having(b.norm, "bias", weight(1)),
        r"parameter 'blocks\.0\.norm\.bias' has shape \[1\], and had \[4\]",
    ),
    "other strides": (
        lambda c, b: having(b.linear, "weight", nn.Parameter(torch.rand(4, 4).t())),
        r"'blocks\.0\.linear\.weight' has strides \(1, 4\)",
    ),
    "another shape of a buffer": (
        lambda c, b: having(b, "scale", torch.ones(1)),
        r"buffer 'blocks\.0\.scale' has shape \[1\]",
    ),
    "a buffer that was removed": (
        lambda c, b: having(b, "scale", None),
        r"buffer 'blocks\.0\.scale' was removed",
    ),
    "a parameter more": (
        lambda c, b: having(b, "gain", weight(4)),
        r"'blocks\.0\.gain' was added",
    ),
    "frozen": (
        lambda c, b: having(b.linear.weight, "requires_grad", False),
        r"'blocks\.0\.linear\.weight' has requires_grad False, and had True",
    ),
    "thawed": (
        lambda c, b: having(c.model.frozen.weight, "requires_grad", True),
        r"'frozen\.weight' has requires_grad True",
    ),
    "no longer tied": (
        lambda c, b: having(c.model.head, "weight", weight(4, 4)),
        r"'entry\.weight' and 'head\.weight' are no longer the same tensor",
    ),
    "tied": (
        lambda c, b: having(b.linear, "weight", c.model.entry.weight),
        r"'entry\.weight' and 'blocks\.0\.linear\.weight' are now the same tensor",
    ),
    "a hook on a gradient": (
        lambda c, b: hooked(b.linear.bias.register_hook(lambda g: 2 * g)),
        r"'blocks\.0\.linear\.bias' has a gradient hook",
    ),
    "a hook after a gradient": (
        lambda c, b: hooked(b.linear.bias.register_post_accumulate_grad_hook(lambda p: None)),
        r"'blocks\.0\.linear\.bias' has a gradient hook",
    ),
    "a forward hook": (
        lambda c, b: hooked(b.linear.register_forward_hook(triple)),
        r"the hooks of module 'blocks\.0\.linear' changed",
    ),
    "a forward pre-hook": (
        lambda c, b: hooked(b.register_forward_pre_hook(lambda m, x: None)),
        r"the hooks of module 'blocks\.0' changed",
    ),
    "a backward hook": (
        lambda c, b: hooked(b.register_full_backward_hook(lambda *_: None)),
        r"the hooks of module 'blocks\.0' changed",
    ),
    "a hook for all modules": (
        lambda c, b: hooked(nn.modules.module.register_module_forward_hook(triple)),
        "torch's hooks for all modules changed",
    ),
    "a parametrization": (
        lambda c, b: parametrized(b.linear),
        r"module 'blocks\.0\.linear' is a ParametrizedLinear, and was a Linear",
    ),
    "a sub-module of another class": (
        lambda c, b: having(b, "norm", nn.Identity()),
        r"module 'blocks\.0\.norm' was replaced",
    ),
    "a sub-module of the same class": (
        lambda c, b: having(b, "norm", nn.LayerNorm(4, eps=1.0)),
        r"module 'blocks\.0\.norm' was replaced",
    ),
    "a sub-module more": (
        lambda c, b: having(c.model.blocks, "2", nn.Linear(4, 4)),
        r"module 'blocks\.2' was added",
    ),
    "a forward of its own": (
        lambda c, b: having(b.norm, "forward", lambda x: x),
        r"module\.blocks\.0\.norm has no 'forward' of its own",
    ),
    "another forward of a class": (
        lambda c, b: mock.patch.object(Block, "forward", lambda self, x: x),
        r"Block\.forward was replaced",
    ),
    "eval mode": (
        lambda c, b: evaluating(b.drop),
        r"module 'blocks\.0\.drop' is in eval mode, and was in train mode",
    ),
    "the rate of dropout": (
        lambda c, b: having(b.drop, "p", 0.5),
        r"module\.blocks\.0\.drop\.p == 0\.0",
    ),
    "an epsilon": (
        lambda c, b: having(b.norm, "eps", 1.0),
        r"module\.blocks\.0\.norm\.eps == 0\.001",
    ),
    "an attribute over that of the class": (
        lambda c, b: having(b, "shared", 2.0),
        r"module\.blocks\.0 has no 'shared' of its own",
    ),
    "an element of a list": (
        lambda c, b: having(b, "factors", [1.0, 3.0]),
        r"module\.blocks\.0\.factors\[1\] == 2\.0",
    ),
    "a longer list": (
        lambda c, b: having(b, "factors", [1.0, 2.0, 3.0]),
        r"module\.blocks\.0\.factors",
    ),
    "a field of an object": (
        lambda c, b: having(b.options, "gain", 2.0),
        r"options\.gain == 1\.5",
    ),
    "a global value": (
        lambda c, b: mock.patch.dict(globals(), FACTOR=2.0),
        r"FACTOR == 1\.0",
    ),
    "a global tensor": (
        lambda c, b: mock.patch.dict(globals(), WEIGHTS=torch.zeros(4)),
        r"the tensor \S*test_step_binding\.WEIGHTS was replaced",
    ),
    "a tensor that is no buffer": (
        lambda c, b: having(b, "mask", torch.zeros(4)),
        r"the tensor module\.blocks\.0\.mask was replaced",
    ),
    "an attribute of the loss": (
        lambda c, b: having(c.loss, "power", 3.0),
        r"loss_fn\.power == 2\.0",
    ),
    "a hook on the loss": (
        lambda c, b: hooked(c.loss.register_forward_hook(triple)),
        "the hooks of module 'loss_fn' changed",
    ),
    "no_grad": (lambda c, b: torch.no_grad(), r"called under torch\.no_grad"),
    "inference mode": (lambda c, b: torch.inference_mode(), "or inference_mode"),
    "autocast": (
        lambda c, b: torch.autocast("cpu", torch.bfloat16),
        r"autocast is torch\.bfloat16, and was off",
    ),
    "another default dtype": (
        lambda c, b: default_dtype(torch.float64),
        r"default dtype is torch\.float64, and was torch\.float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(case: Case, name: str) -> None:
    change, message = REFUSED[name]
    parameters = case.tensors()
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    with change(case, case.model.blocks[0]):
        with pytest.raises(RunError, match=message):
            case.step(case.batches)
        with pytest.raises(RunError, match=message):
            case.step.record(case.batches)
        for parameter, gradient in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    case.check()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_values_in_closures() -> None:
    """A number that a loss function sees from outside is a value, a tensor a constant."""
    factor, target = 2.0, torch.rand(3, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - target).square().mean() * factor

    case = Case(nn.Linear(4, 4), loss)
    case.check()
    target.mul_(3)
    case.check()
    target = torch.rand(3, 4)
    with pytest.raises(RunError, match="the tensor target was replaced"):
        case.check()
    case = Case(nn.Linear(4, 4), loss)
    factor = 3.0
    with pytest.raises(
        RunError, match=r"`factor == 2\.0`, which the forward relies on \(.*\* factor\)"
    ):
        case.check()


def test_gradients_of_a_replaced_parameter_stay_its_own() -> None:
    """Gradients are added by autograd's rules: the new parameter has its own, also one it brought
    along, and what the old one was given no longer changes."""
    case = Case(nn.Linear(4, 4), squares, strands=2)
    case.step(case.batches)
    old, grad = case.model.weight, case.model.weight.grad
    kept = grad.clone()
    case.model.weight = nn.Parameter(old.detach() * 2)
    case.step(case.batches)
    assert torch.equal(grad, kept)
    assert old.grad is grad
    first = case.model.weight.grad.clone()
    case.model.weight = nn.Parameter(case.model.weight.detach())
    case.model.weight.grad = torch.ones(4, 4)
    case.step(case.batches)
    torch.testing.assert_close(case.model.weight.grad, first + 1)
    case.model.weight.data = torch.rand(4, 4)
    case.step(case.batches)  # the gradient stays and is added to, as `.data` is the same parameter
    case.check()


class Sparse(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.long().abs() % 5)


def with_hook(register: str, hook: Callable[..., Any], parameter: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    getattr(model[1].weight if parameter else model[1], register)(hook)
    return model


class Unregistered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.others = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](super().forward(x))


BEFORE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a sparse embedding": (lambda: Sparse(nn.Embedding(5, 4, sparse=True)), "has sparse=True"),
    "a sparse bag": (lambda: Sparse(nn.EmbeddingBag(5, 4, sparse=True)), "has sparse=True"),
    "a backward hook": (
        lambda: with_hook("register_full_backward_hook", lambda *_: None),
        "module '1' has a backward hook",
    ),
    "a backward pre-hook": (
        lambda: with_hook("register_full_backward_pre_hook", lambda *_: None),
        "module '1' has a backward hook",
    ),
    "a hook on a gradient": (
        lambda: with_hook("register_hook", lambda g: 2 * g, parameter=True),
        r"parameter '1\.weight' has a gradient hook",
    ),
    "a hook after a gradient": (
        lambda: with_hook("register_post_accumulate_grad_hook", lambda p: None, parameter=True),
        r"parameter '1\.weight' has a gradient hook",
    ),
    "modules in a list": (Unregistered, r"module\.others\[0\]\.\w+ requires a gradient"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_refused_when_compiling(name: str) -> None:
    """What was there before, and what a traced step could not do."""
    make, message = BEFORE[name]
    with pytest.raises(InputError, match=message):
        Case(make(), squares)


def test_weights_that_the_loss_brings_along() -> None:
    """A second module behind the loss function would get no gradient, unless it is frozen."""
    head = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"^head\.\w+ requires a gradient and is no parameter"):
        Case(nn.Linear(4, 4), lambda m, x: head(m(x)).square().mean())
    head.requires_grad_(False)
    case = Case(nn.Linear(4, 4), lambda m, x: head(m(x)).square().mean())
    case.check()
    head.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)
    with pytest.raises(RunError, match=r"the tensor head\.weight was replaced"):
        case.check()


class HalfPrecise(nn.Linear):
    """Under autocast, but for one product."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = x @ self.weight
        return super().forward(x) + exact


def test_compiled_under_autocast() -> None:
    """Conversions are in the graphs, and nothing is converted twice."""
    # Without its cache eager PyTorch too adds gradients of micro-batches in float32.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        case = Case(HalfPrecise(4, 4), squares)
        case.check()
    with pytest.raises(RunError, match=r"autocast is off, and was torch\.bfloat16"):
        case.check()


def hooks_from_before() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(triple)
    model[1].register_forward_pre_hook(lambda m, x: (x[0] + 1,))
    return model


class HookInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda g: 2 * g)
        return y


STRANGERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda m: setattr(m, "norm_first", True),
        r"module\.norm_first == False",
    ),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
        lambda m: parametrize.remove_parametrizations(m[0], "weight"),
        r"module '0' is a Linear, and was a ParametrizedLinear",
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda m: m.parametrizations.weight[0].eval(),
        r"module 'parametrizations\.weight\.0' is in eval mode",
    ),
    "hooks from before": (
        hooks_from_before,
        lambda m: m[0]._forward_hooks.clear(),
        "the hooks of module '0' changed",
    ),
    "a hook in forward": (lambda: HookInForward(4, 4), lambda m: m.double(), "has dtype float64"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers(name: str) -> None:
    """Other people's modules: right numbers, also after all tensors were replaced; then a refusal
    by name."""
    make, change, message = STRANGERS[name]
    torch.manual_seed(5)
    case = Case(make(), squares)
    case.check()
    state = {name: value + 0.5 for name, value in case.model.state_dict().items()}
    case.model.load_state_dict(state, assign=True)
    case.check()
    change(case.model)
    with pytest.raises(RunError, match=message):
        case.check()


def test_a_model_of_transformers() -> None:
    """Rotary tables that are replaced are taken over; a field of the configuration is refused."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = hf.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
        initializer_range=0.5,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    batches = [(torch.randint(0, 16, (2, 8)),) for _ in range(2)]

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens, labels=tokens, use_cache=False).loss

    step = interlace.compile_step(model, loss, batches[0], strands=1, config=QUICK)
    before = step(batches)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3
    model.zero_grad()
    found = step(batches)
    assert abs(float(found - before)) > 1e-4
    wanted = (loss(model, *batches[0]) + loss(model, *batches[1])) / 2
    torch.testing.assert_close(found, wanted.detach())
    model.config._attn_implementation = "eager"
    with pytest.raises(RunError, match="_attn_implementation"):
        step(batches)


def layouts() -> dict[str, Any]:
    """What a rank of two finds of sharded parameters that are replaced."""
    with gloo_group():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        twin = copy.deepcopy(model)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        batches = [(torch.randn(3, 4),) for _ in range(2)]
        found: dict[str, Any] = {}
        for strands in (1, 2):
            step = interlace.compile_step(
                model, squares, batches[0], mesh=mesh, strands=strands, config=QUICK
            )
            fresh = {name: torch.rand_like(value) for name, value in twin.state_dict().items()}
            sharded = {
                name: distribute_tensor(value, mesh, model.get_parameter(name).placements)
                for name, value in fresh.items()
            }
            model.load_state_dict(sharded, assign=True)
            found[f"{strands}: load_state_dict(assign=True)"] = near(step, model, twin, batches)
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
            found[f"{strands}: .data"] = near(step, model, twin, batches)
            for parameter in model.parameters():
                parameter._local_tensor = parameter._local_tensor / 4
            found[f"{strands}: local tensor"] = near(step, model, twin, batches)
        before = model[0].weight
        model[0].weight = nn.Parameter(distribute_tensor(fresh["0.weight"], mesh, [Replicate()]))
        with pytest.raises(RunError, match=r"'0\.weight' has placements \(Replicate\(\),\)"):
            step(batches)
        model[0].weight = nn.Parameter(fresh["0.weight"])
        with pytest.raises(RunError, match=r"'0\.weight' has class Parameter, and had DTensor"):
            step(batches)
        model[0].weight = before
        assert isinstance(before, DTensor)
        assert before.placements == (Shard(0),)
        found["back"] = near(step, model, twin, batches)
        return found


def near(step: interlace.Step, model: nn.Module, twin: nn.Module, batches: Sequence[Any]) -> bool:
    """Whether the step gives what `twin` gives with the weights that `model` has now."""
    model.zero_grad()
    twin.zero_grad()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.data = parameter.detach().full_tensor()
    found = step(batches)
    wanted = (squares(twin, *batches[0]) + squares(twin, *batches[1])) / 2
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    return True


def test_layouts_over_ranks() -> None:
    """DTensors that are replaced by others of their layout are taken over, others refused."""
    for result in run_ranks("test_step_binding:layouts", 2, timeout_s=100):
        assert len(result.value) == 7
        assert all(result.value.values()), result.value
