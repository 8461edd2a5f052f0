"""Find the collectives of a traced graph that matmuls next to them can hide.

Slices are rows: the leading dimensions of activations, flattened. Views that keep the last
dimension, casts and additions keep rows apart, so matmuls are found through them.

    all-gather -> ... -> mm            every matmul whose rows are the gathered ones
    mm, mm + mm, ... -> reduce-scatter  or all-reduce: every matmul of the sum
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from interlace.decompose.rewrite.expert_groups import expert_sites
from interlace.decompose.sites import Missed, Site, SiteKind
from interlace.graphs.collectives import TABLE, group_of, is_collective, is_wait, kind_of_collective
from interlace.graphs.module_paths import module_path
from interlace.graphs.torch_private import process_group
from interlace.graphs.trace import StrandGraph
from interlace.ir.graph import Kind

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
"""Views that keep the rows of their input if they keep its last dimension."""
_MATMULS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Position of the operand whose rows are the result's rows."""


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather [rows, ...] -> [ranks * rows, ...] and the matmuls of its rows."""

    collective: fx.Node
    wait: fx.Node
    matmuls: tuple[fx.Node, ...]
    is_read_whole: bool
    """Whether somebody else reads what was gathered, such as a weight gradient."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of matmuls that is added up over ranks."""

    collective: fx.Node
    wait: fx.Node
    root: fx.Node
    matmuls: tuple[fx.Node, ...]


def find_sites(
    strand: StrandGraph, axis_of_group: Mapping[str, str]
) -> tuple[list[Site], list[Missed]]:
    """Every collective of a strand, as a site or with the reason why it is none."""
    sites: list[Site] = []
    missed: list[Missed] = []
    taken: dict[str, str] = {}
    experts = expert_sites(strand, axis_of_group)
    for node in strand.graph.nodes:
        if not is_collective(node) or node.name in experts.backs:
            continue
        if node.name in experts.sites:
            sites.append(experts.sites[node.name])
            continue
        match = experts.missed.get(node.name) or match_site(node)
        if not isinstance(match, str):
            site = _site(strand, match, axis_of_group)
            other = next((taken[name] for name in site.matmuls if name in taken), None)
            if other is None:
                taken |= dict.fromkeys(site.matmuls, node.name)
                sites.append(site)
                continue
            match = f"its matmul is decomposed with {other}"
        kind = kind_of_collective(node.target, node.args)
        missed.append(
            Missed(
                strand=strand.name,
                collective=node.name,
                kind=str(kind),
                reason=match,
                module=module_path(node),
            )
        )
    return sites, missed


def match_site(collective: fx.Node) -> Gather | Sum | str:
    """What can be decomposed around a collective, or why nothing can."""
    kind = kind_of_collective(collective.target, collective.args)
    if collective.target not in TABLE:
        return "it is no collective of torch"
    if kind is Kind.SEND:
        return "it is a send already"
    if kind is Kind.ALL_TO_ALL:
        return "what follows an all-to-all needs all of it"
    if process_group(group_of(collective)).size() == 1:
        return "its group has one rank"
    waits = [user for user in collective.users if is_wait(user)]
    if len(waits) != 1 or len(collective.users) != 1:
        return "its result is not waited for in one place"
    if kind is Kind.ALL_GATHER:
        return _match_gather(collective, waits[0])
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
        return _match_sum(collective, waits[0])
    return f"{kind} is not decomposed"


def _match_gather(collective: fx.Node, wait: fx.Node) -> Gather | str:
    found: list[fx.Node] = []
    whole = False
    stack = [wait]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op == "call_function" and _keeps_rows(user, node):
                stack.append(user)
            elif _row_operand(user) is node and not _also_reads(user, collective):
                found.append(user)
            else:
                whole = True
    if not found:
        return "no matmul reads the gathered rows: " + _readers(wait)
    return Gather(collective, wait, tuple(sorted(found)), whole)


def _also_reads(matmul: fx.Node, collective: fx.Node) -> bool:
    """Whether another operand of a matmul is made from what was gathered."""
    position = _MATMULS[matmul.target]  # type: ignore[index]
    stack = [n for n in _others(matmul, position) if isinstance(n, fx.Node)]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node is collective:
            return True
        if node not in seen and collective < node:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _others(matmul: fx.Node, position: int) -> list[object]:
    return [value for index, value in enumerate(matmul.args) if index != position]


def _match_sum(collective: fx.Node, wait: fx.Node) -> Sum | str:
    root = collective.args[0]
    assert isinstance(root, fx.Node)
    matmuls = matmuls_of(root)
    if not matmuls:
        return f"no matmul makes its input, but {_named(root)}"
    if collective.args[1] != "sum":
        return f"it reduces by {collective.args[1]!r}"
    if not _value(root).is_contiguous():
        return "its input is not contiguous"
    ranks = process_group(group_of(collective)).size()
    if rows_of(root) % ranks:
        return f"{rows_of(root)} rows cannot be divided among {ranks} ranks"
    return Sum(collective, wait, root, tuple(matmuls))


def matmuls_of(node: fx.Node) -> list[fx.Node]:
    """The matmuls whose sum a value is, in the order of the additions; empty if it is none.

    Only those whose result nobody else reads.
    """
    if len(node.users) != 1 or node.op != "call_function":
        return []
    if is_matmul(node):
        return [node]
    if is_sum(node):
        left, right = node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        return matmuls_of(left) + matmuls_of(right)
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is not None and _keeps_rows(node, source):
        return matmuls_of(source)
    return []


def is_matmul(node: fx.Node) -> bool:
    """A product of matrices, with a bias of the result's columns at most."""
    return _row_operand(node) is not None


def is_sum(node: fx.Node) -> bool:
    """An addition of two values of the same shape and type."""
    if node.target != aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    values = [n.meta["val"] if isinstance(n, fx.Node) else None for n in node.args]
    own = _value(node)
    return all(
        isinstance(v, Tensor) and v.shape == own.shape and v.dtype == own.dtype for v in values
    )


def _row_operand(node: fx.Node) -> fx.Node | None:
    """The operand of a matmul whose rows are the rows of the result."""
    position = _MATMULS.get(node.target)  # type: ignore[call-overload]
    if position is None or node.kwargs:
        return None
    operand = node.args[position]
    if position:
        bias = node.args[0]
        if not isinstance(bias, fx.Node) or _value(bias).ndim != 1:
            return None
    return operand if isinstance(operand, fx.Node) else None


def _keeps_rows(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node's value has the rows of `source`: the same elements, the same last
    dimension."""
    if node.target == aten._to_copy.default:
        return set(node.kwargs) <= {"dtype"}
    if node.target not in _RESHAPES:
        return False
    value, looked_at = _value(node), _value(source)
    return (
        bool(value.ndim) and bool(looked_at.ndim) and value.shape[-1] == looked_at.shape[-1]
        and looked_at.is_contiguous()
    )  # fmt: skip


def rows_of(node: fx.Node) -> int:
    """Rows of a value: the product of all dimensions but the last."""
    return prod(_value(node).shape[:-1])


def row_operand(matmul: fx.Node) -> fx.Node:
    """The operand [rows, K] of a matmul that `is_matmul`."""
    operand = _row_operand(matmul)
    assert operand is not None
    return operand


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def _site(strand: StrandGraph, match: Gather | Sum, axis_of_group: Mapping[str, str]) -> Site:
    collective = match.collective
    group = group_of(collective)
    ranks = process_group(group).size()
    kinds: dict[Kind, SiteKind] = {
        Kind.ALL_GATHER: "gather_matmul",
        Kind.REDUCE_SCATTER: "matmul_scatter",
        Kind.ALL_REDUCE: "matmul_reduce",
    }
    kind = kind_of_collective(collective.target, collective.args)
    sent = collective.args[0]
    assert isinstance(sent, fx.Node)
    rows = _value(match.matmuls[0]).shape[0] // ranks
    full = _value(sent)
    size = full.numel() * full.element_size()
    return Site(
        strand=strand.name,
        kind=kinds[kind],
        collective=collective.name,
        matmuls=tuple(node.name for node in match.matmuls),
        group=group,
        ranks=ranks,
        rows=rows,
        bytes=size if kind is Kind.ALL_GATHER else size // ranks,
        flops=sum(
            2 * rows * _value(row_operand(node)).shape[1] * _value(node).shape[1]
            for node in match.matmuls
        ),
        lane=axis_of_group.get(group, ""),
        module=_module(strand, match.matmuls),
    )


def _module(strand: StrandGraph, matmuls: tuple[fx.Node, ...]) -> str:
    """The modules whose weights the matmuls read, as in `blocks.0.ffn.gate, up`."""
    names = []
    for matmul in matmuls:
        position = _MATMULS[matmul.target]  # type: ignore[index]
        source = matmul.args[position + 1]
        while isinstance(source, fx.Node) and source.op == "call_function" and source.args:
            source = source.args[0]
        if isinstance(source, fx.Node) and source.op == "placeholder":
            names.append(strand.bindings[source.name].target.removesuffix(".weight"))
    if not names:
        return module_path(matmuls[0])
    first, *others = names
    return ", ".join([first, *(name.rpartition(".")[2] for name in others)])


def _readers(wait: fx.Node) -> str:
    users = sorted({_named(user) for user in wait.users})
    return f"it is read by {', '.join(users)}"


def _named(node: fx.Node) -> str:
    if node.op == "output":
        return "the backward"
    if node.op == "placeholder":
        return "an input"
    target = str(node.target)
    return target.removesuffix(".default") if "." in target else getattr(target, "__name__", target)
