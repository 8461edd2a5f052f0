"""Modules as people have them: layers of torch and of transformers, odd inputs, odd parameters.

A new one is a line in `CASES`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from strange_world import Batch, Case, call
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def numbers(*shape: int) -> Callable[[], Batch]:
    """A batch of one tensor of float64."""
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def words(*shape: int, of: int = 11) -> Callable[[], Batch]:
    """A batch of token ids."""
    return lambda: (torch.randint(0, of, shape),)


def double(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module with weights of float64."""
    return lambda: make().double()


class Function(nn.Module):
    """Parameters by name, and what is computed of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def function(code: Callable[..., Tensor], **shapes: Any) -> Callable[[], nn.Module]:
    """A `Function` with parameters of these shapes, or of these values."""

    def made() -> nn.Module:
        values = {
            name: shape if isinstance(shape, Tensor) else torch.randn(shape, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        return Function(code, **values)

    return made


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` as most people call it."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class Pictures(nn.Module):
    """Convolutions, groups, pooling and a flattened end."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(),
            nn.Conv2d(4, 4, 3, groups=4), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def pictures() -> nn.Module:
    model = Pictures().double()
    model(torch.zeros(2, 3, 6, 6, dtype=torch.float64))
    return model


class Tied(nn.Module):
    """A language model of one layer whose head is its table."""

    def __init__(self, words: int = 11, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 6, padding_idx=padding)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(6, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.table(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Scaled(nn.Module):
    """Has a buffer in its forward, and a mask that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale * self.mask


class Recomputed(nn.Module):
    """Blocks under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: torch.tanh(b(y)), x, use_reentrant=False)
        return x


class Twice(torch.autograd.Function):
    """An operator with a gradient of its own, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Partly(nn.Module):
    """Of four parameters one is frozen, one is never used, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.both = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(torch.tanh(self.frozen(self.both(x))))


class Adapted(nn.Module):
    """A frozen layer and a low-rank update of it in parallel, in the structure of LoRA (PEFT)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(0.0)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 8 / rank}
        self.active = ["default"]

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for name in self.active:
            update = self.lora_B[name](self.lora_A[name](self.drop(x)))
            result = result + update * self.scaling[name]
        return result


def adapted() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 6).requires_grad_(False), Adapted(nn.Linear(6, 8)), nn.SiLU(),
        nn.Linear(8, 8).requires_grad_(False), Adapted(nn.Linear(8, 3)),
    )  # fmt: skip


def transposed_weight() -> nn.Module:
    """A weight that lies in memory by columns."""
    linear = nn.Linear(3, 5).double()
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    return linear


def llama(words: int = 11) -> nn.Module:
    """A Llama of transformers, as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
    ).double()


def llama_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


def alternating(*batches: Callable[[], Batch]) -> Callable[[], Batch]:
    """Two batches of each kind in turn, so that two ranks that share them begin with one kind."""
    count = -1

    def drawn() -> Batch:
        nonlocal count
        count += 1
        return batches[count // 2 % len(batches)]()

    return drawn


def channels_last() -> Batch:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    return (x.to(memory_format=torch.channels_last),)


def turned() -> Batch:
    return (torch.randn(5, 2, dtype=torch.float64).t(),)


def repeated() -> Batch:
    return (torch.randn(1, 3, dtype=torch.float64).expand(2, 3),)


def flattened(model: nn.Module, x: Tensor) -> Tensor:
    return (model.w * x.flatten()).square().mean()


def assigned(module: nn.Module) -> None:
    """`load_state_dict(assign=True)` of other values."""
    state = {name: value.detach().clone() * 1.5 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def replaced(module: nn.Module) -> None:
    """Another parameter under the same name."""
    module[0].weight = nn.Parameter(module[0].weight.detach() * 0.5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def hooked(module: nn.Module) -> None:
    """The first layer's output counts twice."""
    module[0].register_forward_hook(lambda _, inputs, output: 2 * output)


def parameter_hooked(module: nn.Module) -> None:
    """The first weight's gradient counts twice."""
    module[0].weight.register_hook(lambda gradient: 2 * gradient)


def changed(module: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """The module after the change."""
    change(module)
    return module


CASES = [
    # Strides that the trace does not foresee, and batches that lie otherwise than the example.
    Case("attention, batch first", double(lambda: SelfAttention(weights=False)), numbers(2, 3, 8)),
    Case("attention with weights", double(lambda: SelfAttention(weights=True)), numbers(2, 3, 8)),
    Case("encoder layer", double(encoder), numbers(2, 3, 8)),
    Case("decoder layer", double(lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0)),
         lambda: numbers(3, 2, 8)() + numbers(4, 2, 8)()),
    Case("pictures", pictures, numbers(2, 3, 6, 6)),
    Case("pictures, channels last", pictures, channels_last),
    Case("pictures, in turn", pictures, alternating(numbers(2, 3, 6, 6), channels_last)),
    Case("transposed batch", function(flattened, w=(10,)), alternating(numbers(2, 5), turned)),
    Case("sliced batch", double(lambda: nn.Linear(3, 2)),
         alternating(numbers(2, 3), lambda: (torch.randn(4, 6, dtype=torch.float64)[::2, ::2],))),
    Case("expanded batch", double(lambda: nn.Linear(3, 2)),
         alternating(numbers(2, 3), repeated)),
    Case("transposed weight", transposed_weight, numbers(4, 3)),
    # Layers of torch.
    Case("transposed convolution", double(lambda: nn.ConvTranspose1d(3, 4, 2)), numbers(2, 3, 5)),
    Case("bilinear", double(lambda: nn.Bilinear(3, 4, 2)),
         lambda: numbers(5, 3)() + numbers(5, 4)()),
    Case("bag of words", double(lambda: nn.EmbeddingBag(11, 4)), words(3, 5)),
    Case("tied head, padding", double(lambda: Tied(padding=0)), words(2, 5), call),
    Case("weight norm", double(lambda: parametrizations.weight_norm(nn.Linear(4, 3))),
         numbers(2, 4)),
    Case("orthogonal", double(lambda: parametrizations.orthogonal(nn.Linear(3, 3))),
         numbers(2, 3)),
    Case("recomputed", double(Recomputed), numbers(2, 4)),
    Case("GRU", double(lambda: nn.GRU(3, 4, batch_first=True)), numbers(2, 4, 3),
         lambda m, x: m(x)[0].square().mean()),
    Case("LSTM", double(lambda: nn.LSTM(3, 4, batch_first=True)), numbers(2, 4, 3),
         lambda m, x: m(x)[0].square().mean()),
    Case("Llama of transformers", llama, words(2, 5), llama_loss),
    # Parameters of every kind.
    Case("scalar parameter", function(lambda m, x: m.w * x, w=()), numbers(3)),
    Case("expanded gradient", function(lambda m, x: m.w.sum() * x, w=(3, 4)), numbers(3)),
    Case("one column", function(lambda m, x: x @ m.w + m.b, w=(3, 1), b=(1,)), numbers(4, 3)),
    Case("empty parameter", function(lambda m, x: x * m.w + m.e.sum(), w=(3,), e=(0, 4)),
         numbers(3)),
    Case("parts of one", function(lambda m, x: x @ m.w[:3] + x @ m.w[3:], w=(6, 2)), numbers(4, 3)),
    Case("chosen rows", function(lambda m, i: m.w[i].square(), w=(5, 2)), words(4, of=5)),
    Case("written rows", function(
        lambda m, x: torch.zeros_like(x).index_add(0, torch.tensor([1, 1, 0]), x * m.w), w=(4,)),
        numbers(3, 4)),
    Case("frozen, unused, twice", double(Partly), numbers(2, 4)),
    Case("low-rank adapters", double(adapted), words(2, 5)),
    Case("own gradient", function(lambda m, x: Twice.apply(m.w) * x, w=(3,)), numbers(3)),
    Case("two types", lambda: nn.Sequential(
        nn.Linear(3, 4), Function(lambda m, x: x.double() * m.w, w=torch.randn(4).double())),
        lambda: (torch.randn(2, 3),), bound=1e-6),
    Case("bfloat16", lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2)).bfloat16(),
         lambda: (torch.randn(3, 4).bfloat16(),), bound=2e-2),
    Case("sine and sums", function(lambda m, x: torch.cumsum(torch.einsum("ij,bj->bi", m.w, x), 1),
                                   w=(3, 4)), numbers(2, 4)),
    Case("Fourier", function(lambda m, x: torch.fft.rfft(x * m.w).abs(), w=(8,)), numbers(2, 8)),
    Case("sorted", function(lambda m, x: torch.sort(x * m.w, dim=1).values[:, :2], w=(4,)),
         numbers(3, 4)),
    # What changes after the step was compiled.
    Case("assigned", mlp, numbers(2, 4), change=assigned),
    Case("replaced parameter", mlp, numbers(2, 4), change=replaced),
    Case("replaced buffer", double(Scaled), numbers(2, 4),
         change=lambda m: setattr(m, "scale", m.scale * 3)),
    Case("buffer in place", double(Scaled), numbers(2, 4), change=lambda m: m.mask.add_(1)),
    Case("memory of a parameter", mlp, numbers(2, 4),
         change=lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2)),
    Case("replaced layer", mlp, numbers(2, 4),
         change=lambda m: m.__setitem__(1, nn.ReLU()), refused="1"),
    Case("hook set later", mlp, numbers(2, 4),
         change=hooked, refused="hook"),
    Case("hook set before", lambda: changed(mlp(), hooked), numbers(2, 4)),
    Case("hook of a parameter", lambda: changed(mlp(), parameter_hooked), numbers(2, 4),
         refused="hook"),
    Case("hook of a parameter later", mlp, numbers(2, 4), change=parameter_hooked, refused="hook"),
    Case("frozen later", mlp, numbers(2, 4),
         change=lambda m: m[0].requires_grad_(False), refused="requires_grad"),
    Case("evaluated later", mlp, numbers(2, 4), change=lambda m: m.eval(), refused="eval"),
    Case("norm set later", mlp, numbers(2, 4),
         change=lambda m: parametrizations.weight_norm(m[0]), refused="."),
    # What no step can do.
    Case("sparse gradient", lambda: nn.Embedding(11, 4, sparse=True).double(), words(3, 5),
         refused="sparse"),
    Case("largest norm", double(lambda: nn.Embedding(11, 4, max_norm=0.5)), words(3, 5),
         refused="."),
    Case("running statistics", double(lambda: nn.BatchNorm1d(4)), numbers(3, 4),
         refused="writes to buffer"),
    Case("spectral norm", double(lambda: parametrizations.spectral_norm(nn.Linear(4, 3))),
         numbers(2, 4), refused="changes Python state|writes to buffer"),
    Case("written input", function(lambda m, x: x.mul_(2) * m.w, w=(3,)), numbers(3),
         refused="writes to input"),
]  # fmt: skip
