"""Say which module and which line of the user's code cannot be traced, and what to do about it."""

import re
import traceback
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from interlace.errors import InputError
from interlace.graphs.collectives import TABLE, is_collective, is_wait, row_of, unknown
from interlace.graphs.joint import InputOf

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
"""Finds the lines of a Python trace that say where."""
_LIBRARY = Path(torch.__file__).parent
"""Where torch lies: lines in it are not the user's."""
_RAISED = re.compile(r"raised exception (\w+)\((['\"])(.*)\2\)")
"""Finds what a forward raised, in torch's message on an exception that nobody caught."""
_SIDE_EFFECTS = "certain side effects happened in the model.forward"
"""What torch's message says when forward changed something outside."""
_COLLECTOR = "._active_collector"
"""End of the source of a variable that forwards of `transformers` set and put back, and our own
counts of their experts (`models.published_load`)."""

_NO_FLEX = (
    "FlexAttention is not traced: it would take operators of a graph that hold the function of its "
    "mask, forward and backward, and times for them. Take "
    "torch.nn.functional.scaled_dot_product_attention with is_causal=True or a boolean attn_mask; "
    "models of transformers do by attn_implementation='sdpa'"
)
"""What to do in place of `flex_attention`, which PyTorch trains on GPUs only."""
_HINTS = (
    (("flex_attention",), _NO_FLEX),
    (
        ("multi_head_attention_forward",),
        "layers of nn.Transformer look at the values of a mask unless they are told: give "
        "tgt_is_causal=True or src_is_causal=True (is_causal=True to a single layer), or False",
    ),
    (
        (
            "Data-dependent",
            "data-dependent",
            "_local_scalar_dense",
            "DynamicOutputShape",
            "DataDependent",
            "nonzero",
        ),
        "make it independent of values in tensors (torch.where, torch.clamp, fixed shapes)",
    ),
    (
        ("distribute_tensor",),
        "lay weights out before, and make DTensors of local values by DTensor.from_local, which "
        "sends nothing",
    ),
    (
        ("has no attribute 'module'", "set_runtime_stats_and_log"),
        "loss_fn is given the module in DistributedDataParallel: call that, and leave .module out",
    ),
    (
        ("raised exception",),
        "see whether eager PyTorch raises it too: call loss_fn(module, *batch)",
    ),
    (
        ("Random.",),
        "draw with torch, as torch.rand(()) in torch.where: from Python's random a traced forward "
        "would draw once for all steps",
    ),
    (
        ("get_rng_state", "set_rng_state"),
        "leave it to torch.utils.checkpoint.checkpoint, which is traced",
    ),
    (
        ("requires_grad_()", "Tensor.requires_grad"),
        "leave it out: only reentrant checkpoints need it. Models of transformers and PEFT do so "
        "after enable_input_require_grads() or gradient_checkpointing_enable(): call "
        "disable_input_require_grads(); those of sound in a feature encoder that is not frozen: "
        "call freeze_feature_encoder()",
    ),
    (
        ("maybe_install_capturing_hooks",),
        "run the model once before compile_step, under torch.no_grad(): it installs them at its "
        "first call, and then no more",
    ),
    (("builtin", "logging"), "move printing, and looking up loggers, out of forward"),
)
"""What to do, by words of torch's message, or names of functions in which it failed."""
_REASONS = (
    ("distribute_tensor", "distribute_tensor in forward sends a tensor from one rank to others"),
    ("Random.", "forward draws from Python's random module"),
    ("get_rng_state", "forward reads the state of torch's random numbers"),
    ("requires_grad_()", "forward calls requires_grad_() on what it has computed"),
    ("maybe_install_capturing_hooks", "forward installs hooks, which keep hidden states"),
    ("set_runtime_stats_and_log", "loss_fn calls DistributedDataParallel"),
)
"""What went wrong, by the same words, where torch's message says something else."""
_OTHER_HINT = "write it with plain torch operators, or train with eager PyTorch"
"""What to do where none of these words is in it."""
_NO_SCHEMA = types.SimpleNamespace(arguments=())
"""Stands for the schema of a node that calls no operator."""


class SourceLine(NamedTuple):
    """A line of somebody's code."""

    file: str
    number: int
    function: str

    @property
    def code(self) -> str:
        """The text of the line, stripped; empty if the file cannot be read."""
        summary = traceback.FrameSummary(self.file, self.number, self.function)
        return (summary.line or "").strip()


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """While `module` is traced: whatever fails becomes an InputError that names the sub-module
    and the line, and so does a forward that changes Python state, which a graph would not."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    except Exception as error:  # dynamo raises many types; all of them mean this
        raise cannot_trace(module, _first_line(error), _lines(error), _hint(error)) from error
    for warning in caught:
        text = str(warning.message)
        if _SIDE_EFFECTS not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif changed := _changed(module, text):
            raise cannot_trace(
                module,
                f"forward changes Python state: {', '.join(changed)}",
                (),
                "a traced forward runs once, not every step: keep state out of forward, or where "
                "it only fills what later calls read, call forward once before compile_step",
            )


def refuse_writes(module: nn.Module, writes: Iterable[tuple[InputOf, fx.Node]]) -> None:
    """Raise InputError if a traced forward writes to its inputs or buffers. `writes` has what is
    written to, and the node whose value it gets."""
    for what, node in writes:
        name = f"input {what.target}" if what.role == "batch" else f"{what.role} {what.target!r}"
        raise cannot_trace(
            module,
            f"forward writes to {name}",
            lines_of(node),
            "work on a copy; of layers with running statistics take one without (GroupNorm, "
            "or BatchNorm with track_running_stats=False)",
        )


def refuse_sparse(module: nn.Module, graph: fx.Graph) -> None:
    """Raise InputError for an operator whose gradient is a sparse tensor in eager PyTorch; a
    traced one would be dense, and an optimizer for sparse gradients does something else then."""
    for node in graph.nodes:
        for position, argument in enumerate(getattr(node.target, "_schema", _NO_SCHEMA).arguments):
            given = node.args[position] if position < len(node.args) else None
            if argument.name == "sparse" and (given or node.kwargs.get("sparse")):
                raise cannot_trace(
                    module,
                    "an embedding has sparse=True, and gradients of a traced step are dense",
                    lines_of(node),
                    "set sparse=False, and take an optimizer for dense gradients",
                )


def refuse_flex_attention(module: nn.Module, graph: fx.Graph) -> None:
    """Raise InputError for an operator of FlexAttention, whose mask is a graph within the graph."""
    for node in graph.nodes:
        if str(node.target).startswith("flex_attention"):
            raise cannot_trace(module, "it calls flex_attention", lines_of(node), _NO_FLEX)


def refuse_collectives(module: nn.Module, graph: fx.Graph) -> None:
    """Raise InputError for the first collective of a traced graph of which nothing is known, or
    which was declared and is not waited for."""
    for node in graph.nodes:
        if not is_collective(node):
            continue
        if row_of(node.target) is None:
            why, hint = unknown(node.target)
            raise cannot_trace(module, why, lines_of(node), hint)
        readers = [user.name for user in node.users if not is_wait(user)]
        if readers and node.target not in TABLE:
            raise cannot_trace(
                module,
                f"{readers[0]} reads the result of {node.target} without waiting for it",
                lines_of(node),
                "call torch.ops._c10d_functional.wait_tensor on the result",
            )


def cannot_trace(module: nn.Module, why: str, lines: Sequence[SourceLine], hint: str) -> InputError:
    """The error for a module that fails at `lines`, innermost last."""
    where = ""
    own = [line for line in lines if not _in_library(line.file)]
    if own:
        line = own[-1]
        owners = owners_of(module, line)
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        named = f" ({owners[0]}{more})" if owners else ""
        where = f"\n  {line.file}:{line.number}, in {line.function}{named}: {line.code}"
    return InputError(f"{type(module).__name__} cannot be traced: {why}{where}", hint=hint)


def owners_of(module: nn.Module, line: SourceLine) -> list[str]:
    """`name: class` of the sub-modules whose code has this line, deepest ones only."""
    found = []
    for name, child in module.named_modules():
        functions = (getattr(kind, line.function, None) for kind in type(child).__mro__)
        codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
        if any(_has_line(code, line) for code in codes):
            found.append(f"{name or 'the module itself'}: {type(child).__name__}")
    return found


def lines_of(node: fx.Node) -> list[SourceLine]:
    """Where in the user's code a traced operator comes from, innermost last."""
    return _parsed(str(node.meta.get("stack_trace") or ""))


def _has_line(code: types.CodeType, line: SourceLine) -> bool:
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return code.co_filename == line.file and min(numbers) <= line.number <= max(numbers)


def _in_library(file: str) -> bool:
    path = Path(file)
    return _LIBRARY in path.parents or Path(__file__).parents[1] in path.parents


def _lines(error: BaseException) -> list[SourceLine]:
    """Lines of the traced code: dynamo keeps them beside the error, or in its text."""
    stack = getattr(error, "real_stack", None)
    if stack:
        return [SourceLine(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
    return _parsed(str(error))


def _parsed(text: str) -> list[SourceLine]:
    return [SourceLine(file, int(number), name) for file, number, name in _FRAME.findall(text)]


def _first_line(error: BaseException) -> str:
    """What went wrong: what the forward raised, or dynamo's words with its explanation, in one
    line."""
    if raised := _RAISED.search(str(error)):
        return f"forward raises {raised[1]}: {raised[3]}"
    if known := [reason for word, reason in _REASONS if word in _words(error)]:
        return known[0]
    lines = [line.strip() for line in str(error).strip().splitlines()]
    first = lines[0] if lines else ""
    found = [line for line in lines if line.startswith("Explanation: ")]
    explanation = found[0].removeprefix("Explanation: ").rstrip(".") if found else ""
    return f"{first} ({explanation})" if explanation else f"{type(error).__name__}: {first}"


def _hint(error: BaseException) -> str:
    text = _words(error)
    return next((hint for words, hint in _HINTS if any(w in text for w in words)), _OTHER_HINT)


def _words(error: BaseException) -> str:
    """The message, and the functions in which it failed."""
    functions = " ".join(line.function for line in _lines(error))
    return f"{type(error).__name__} {error} {functions}"


def set_labels_kind(notes: Iterable[tuple[Any, str, Any]]) -> bool:
    """Set what a captured forward would have noted in configurations of `transformers`
    (`problem_type`, of a classifier that sees labels for the first time), as its eager forward
    does: a later evaluation would, and the step be refused. Whether anything was set. `notes` are
    objects, attributes and values."""
    found = [each for each in notes if _is_configuration(each[0])]
    for config, name, value in found:
        setattr(config, name, value)
    return bool(found)


def _changed(module: nn.Module, text: str) -> list[str]:
    """Sources that dynamo names, as paths of modules: `_modules['a']._modules['b']` is a.b. Without
    what `transformers` keeps there; the text itself if it names none."""
    sources = re.findall(r'"([^"]+)"', text)
    if not sources:
        return [text]
    paths = {source: ".".join(re.findall(r"_modules\['([^']+)'\]", source)) for source in sources}
    return [
        path or source
        for source, path in paths.items()
        if not source.endswith(_COLLECTOR) and not _notes_labels(module, source, path)
    ]


def _notes_labels(module: nn.Module, source: str, path: str) -> bool:
    """Whether this is a configuration of `transformers`, in which classifiers note the kind of
    labels that they see, each time the same."""
    if not source.endswith(".config"):
        return False
    return _is_configuration(getattr(module.get_submodule(path), "config", None))


def _is_configuration(config: object) -> bool:
    """Whether this is a configuration of `transformers`."""
    return any(
        kind.__module__ == "transformers.configuration_utils" for kind in type(config).__mro__
    )
