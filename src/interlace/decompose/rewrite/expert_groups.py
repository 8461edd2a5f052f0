"""The exchanges of a layer of experts cut by groups of experts: rows of one group travel while
another group computes (Comet, arXiv 2502.19811; FiCCO, arXiv 2512.10236).

    rows to group 0, rows to group 1, ...
    group 0 computes; its rows go back; group 1 computes; ...

Every rank's experts are dealt to the same number of groups. What lies between the exchanges of a
layer treats each row by itself (`graphs.ragged`), so a group computes what it computes beside the
others. Values that others read, such as operands of gradients of weights, are put together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from interlace.decompose.sites import Site
from interlace.experts.between_ranks import AS_SENT, EXCHANGE
from interlace.experts.grouped import MATMUL
from interlace.experts.pieces import COUNTS_OF_PIECE, EXPERT_ROWS, MERGED, TOKEN_ROWS
from interlace.graphs.collectives import group_of, is_collective, is_wait
from interlace.graphs.module_paths import module_path
from interlace.graphs.trace import StrandGraph
from interlace.graphs.writer import GraphWriter, erase_unused, move_before

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ExpertRegion:
    """From an exchange to experts to the next one back, of one layer and pass."""

    forth: fx.Node
    back: fx.Node
    between: tuple[fx.Node, ...]
    """What lies on the way from the one to the other, in order; waits are among them."""

    @property
    def matmuls(self) -> tuple[fx.Node, ...]:
        """Of the experts, on the way."""
        return tuple(node for node in self.between if node.target == MATMUL)

    @property
    def experts(self) -> int:
        """Of this rank."""
        return int(_shape(self.matmuls[0].args[1])[0])


@dataclass(frozen=True, slots=True)
class ExpertSites:
    """All exchanges of rows of a strand."""

    sites: Mapping[str, Site]
    """By the name of the exchange to experts."""
    backs: frozenset[str]
    """Exchanges back that belong to them."""
    missed: Mapping[str, str]
    """Why any other one stays whole."""


def expert_sites(strand: StrandGraph, axis_of_group: Mapping[str, str]) -> ExpertSites:
    """Every exchange of rows of a strand, as part of a site or with the reason why it is not."""
    exchanges = [node for node in strand.graph.nodes if node.target == EXCHANGE]
    missed = {n.name: "its rows do not go back in this pass" for n in exchanges if n.args[4]}
    sites: dict[str, Site] = {}
    for back in (node for node in exchanges if not node.args[4]):
        region = match_experts(back)
        if isinstance(region, str):
            missed[back.name] = region
            continue
        sites[region.forth.name] = _site(strand, region, axis_of_group)
        missed.pop(region.forth.name)
    return ExpertSites(sites, frozenset(site.back for site in sites.values()), missed)


def match_experts(back: fx.Node) -> ExpertRegion | str:
    """What can be cut in front of an exchange back to tokens, or why nothing can."""
    if back.args[3] == AS_SENT:
        return "a row that goes back is a sum over several experts (expert_sends is merged)"
    counts = back.args[1]
    above = _reached(back, upwards=True)
    forths = [n for n in above if n.target == EXCHANGE and n.args[4] and n.args[1] is counts]
    if not forths:
        return "no rows that came to experts lead to it"
    forth = max(forths)
    below = _reached(forth, upwards=False)
    region = ExpertRegion(forth, back, tuple(sorted(above & below)))
    if not region.matmuls:
        return "no matmul of experts is in front of it"
    if any(is_collective(node) for node in region.between):
        return "another collective stands between the exchanges"
    if region.experts < 2:
        return "a rank has one expert"
    inside = {back, *region.between}
    for node in region.between:
        if not isinstance(node.meta["val"], Tensor) and not inside.issuperset(node.users):
            return f"others read a part of {node.target}"
    if _rows(region.forth) < region.experts or _rows(region.back) < region.experts:
        return f"{_rows(region.forth)} rows are fewer than the experts of a rank"
    return region


def _reached(start: fx.Node, *, upwards: bool) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        for other in node.all_input_nodes if upwards else node.users:
            if other not in found and other.op == "call_function":
                found.add(other)
                stack.append(other)
    return found


def _site(strand: StrandGraph, region: ExpertRegion, axes: Mapping[str, str]) -> Site:
    """A region as data. Bytes are a rank's part of what is sent one way; rows and FLOPs, of which
    there are `ranks` times as many, are nominal."""
    group, ranks = group_of(region.forth), int(region.forth.args[2])  # type: ignore[call-overload]
    sent: Tensor = region.forth.args[0].meta["val"]  # type: ignore[union-attr]
    rows = _rows(region.forth) // ranks
    return Site(
        strand=strand.name,
        kind="expert_exchange",
        collective=region.forth.name,
        back=region.back.name,
        matmuls=tuple(node.name for node in region.matmuls),
        group=group,
        ranks=ranks,
        rows=rows,
        experts=region.experts,
        bytes=sent.numel() * sent.element_size() // ranks,
        flops=sum(
            2 * rows * _shape(n.args[1])[1] * _shape(n.args[1])[2] for n in region.matmuls
        ),
        lane=axes.get(group, ""),
        module=module_path(region.matmuls[0]),
    )  # fmt: skip


def rewrite_experts(strand: StrandGraph, site: Site, pieces: int) -> None:
    """Cut an `expert_exchange` site into groups of experts, in place."""
    back = next(node for node in strand.graph.nodes if node.name == site.back)
    region = match_experts(back)
    assert isinstance(region, ExpertRegion), f"{site.back} is no site: {region}"
    inside = {region.forth, *region.between}
    outer = [n for node in (*region.between, back) for n in node.all_input_nodes if n not in inside]
    move_before(region.forth, outer)
    writer = GraphWriter(strand.graph, strand.bindings, like=region.forth).at(region.forth)
    groups = [
        _Group(writer, region, site.experts * i // pieces, site.experts * (i + 1) // pieces)
        for i in range(pieces)
    ]
    # All leave before any is waited for, so that a group's rows travel while others compute.
    for group in groups:
        group.start()
    returned = [group.compute() for group in groups]
    _put_together(writer, region, groups, returned)
    erase_unused([user for user in region.back.users if is_wait(user)])


def _put_together(
    writer: GraphWriter, region: ExpertRegion, groups: list["_Group"], returned: list[fx.Node]
) -> None:
    """Whole values where somebody else reads them."""
    inside = {region.forth, region.back, *region.between}
    for node in region.between:
        readers = [user for user in node.users if user not in inside]
        if not readers:
            continue
        whole = writer.call(aten.cat.default, [group.done[node] for group in groups])
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in inside)
    ends = [group.last for group in groups]
    rows = region.back.args[3]
    merged = writer.call(MERGED, returned, region.back.args[1], region.back.args[2], ends, rows)
    for wait in region.back.users:
        assert is_wait(wait), f"{wait.name} reads rows that are still on their way"
        wait.replace_all_uses_with(merged)


class _Group:
    """Some experts of every rank, from `first` on and before `last`: their way through a region."""

    def __init__(self, writer: GraphWriter, region: ExpertRegion, first: int, last: int) -> None:
        self.writer, self.region = writer, region
        self.first, self.last = first, last
        counts, ranks = region.forth.args[1:3]
        self.where: tuple[Any, ...] = (counts, ranks, first, last)
        self.counts = writer.call(COUNTS_OF_PIECE, *self.where)
        self.done: dict[fx.Node, fx.Node] = {}
        """What the nodes of the region are for this group."""

    def start(self) -> None:
        """Send its rows to the experts."""
        rows, _, ranks, arriving, forth, group = self.region.forth.args
        leaving = self.writer.call(TOKEN_ROWS, rows, *self.where, self._share(_rows(rows)))
        self.done[self.region.forth] = self.writer.call(
            EXCHANGE, leaving, self.counts, ranks, self._share(int(arriving)), forth, group  # type: ignore[arg-type]
        )  # fmt: skip

    def compute(self) -> fx.Node:
        """Its share of what lies between, and the way back; returns the rows that came back."""
        for node in self.region.between:
            self.done[node] = self._copy(node)
        rows, _, ranks, token_rows, forth, group = self.region.back.args
        assert isinstance(rows, fx.Node)
        sent = self.writer.call(
            EXCHANGE, self.done[rows], self.counts, ranks, self._share(int(token_rows)), forth,  # type: ignore[arg-type]
            group,
        )  # fmt: skip
        return self.writer.call(torch.ops._c10d_functional.wait_tensor.default, sent)

    def _copy(self, node: fx.Node) -> fx.Node:
        whole = _value(node)

        def own(source: fx.Node) -> fx.Node:
            if source in self.done:
                return self.done[source]
            if source is self.where[0]:
                return self.counts
            if node.target != MATMUL and _has_rows(source, whole):
                return self._cut(source)
            return source

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), own)
        if node.target == MATMUL and node.args[0] not in self.done:
            args = (self._cut(node.args[0]), *args[1:])
        if node.target == aten.view.default:
            args = (args[0], [-1, *node.args[1][1:]])  # type: ignore[index]
        return self.writer.call(node.target, *args, **kwargs)

    def _cut(self, source: Any) -> fx.Node:
        """Its rows of a value from outside, such as one that was kept for the backward."""
        rows, experts = _rows(source), self.region.experts
        start = rows * self.first // experts
        return self.writer.call(EXPERT_ROWS, source, *self.where, start, self._share(rows))

    def _share(self, rows: int) -> int:
        """The nominal number of its rows; those of all groups add up to `rows`."""
        experts = self.region.experts
        return rows * self.last // experts - rows * self.first // experts


def _has_rows(source: fx.Node, result: Tensor) -> bool:
    """Whether a value has a row for each row of `result`; `graphs.ragged` allows others only if
    they are spread over the rows."""
    value = source.meta["val"]
    if not isinstance(value, Tensor) or value.dim() != result.dim():
        return False
    return value.shape[0] == result.shape[0] != 1


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _shape(node: Any) -> torch.Size:
    return _value(node).shape


def _rows(node: Any) -> int:
    return int(_shape(node)[0])
