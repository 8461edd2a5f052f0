"""Query-split attention as a pass over a traced forward: attention, projection, reduce-scatter.

The reduce-scatter behind an output projection is decomposed as any other; then the attention in
front of it is cut as well: each slice of the projection computes the attention of its rows of
queries just before (CommFuse, arXiv 2604.24013, algorithm 4), so that there is more to compute
while the slice before travels. Slices write to one buffer, [sequence, batch, heads * head size],
which is what the projection reads and, seen as [batch, heads, sequence, head size], what the
backward graph reads as the attention's output. Ranks compute other rows in each step, and by a
causal mask other amounts of work, but the operators and their shapes are the same on all of them.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from interlace.decompose import attention_rows
from interlace.decompose.rewrite.find import Sum, find_sites, match_site, row_operand
from interlace.decompose.rewrite.scatter import rewrite_scatter
from interlace.decompose.rewrite.sends import cut_rows
from interlace.decompose.sites import Missed, Site
from interlace.errors import InputError
from interlace.graphs.buffers import filled
from interlace.graphs.trace import StrandGraph
from interlace.graphs.writer import GraphWriter, erase_unused

aten = torch.ops.aten
_KERNELS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)
"""Their first results are the output and the log-sum-exp, and their backwards read both."""
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.clone.default})
"""Operators that are looked through on the way back from the projection to the attention."""
_SEQUENCE_FIRST, _BATCH_FIRST = [2, 0, 1, 3], [0, 2, 1, 3]
_RANDOM_STATE = 2
"""Elements of the seeds and offsets that kernels return, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """An attention kernel whose output is all that a projection reads."""

    kernel: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    is_causal: bool
    chain: tuple[fx.Node, ...]
    """From the kernel's output to the projection's operand: the output itself, a permutation, and
    reshapes and copies."""

    @property
    def batch(self) -> int:
        """Rows of the operand for each position."""
        return self.query.meta["val"].shape[0]

    @property
    def flops(self) -> int:
        """Two matmuls; half of each below the diagonal."""
        *others, size = self.query.meta["val"].shape
        keys = self.key.meta["val"].shape[2]
        return 4 * prod(others) * keys * size // (2 if self.is_causal else 1)


def find_attention(
    strand: StrandGraph, axis_of_group: Mapping[str, str]
) -> tuple[list[Site], list[Missed]]:
    """The sites of kind `attention_scatter`, each of which `find_sites` finds as a
    `matmul_scatter`, and the other `matmul_scatter` sites with the reason why they are none."""
    found: list[Site] = []
    missed: list[Missed] = []
    sites, _ = find_sites(strand, axis_of_group)
    for site in sites:
        if site.kind != "matmul_scatter":
            continue
        match = match_attention(_node(strand, site.collective))
        if isinstance(match, AttentionKernel):
            flops = site.flops + match.flops // site.ranks
            found.append(replace(site, kind="attention_scatter", flops=flops))
            continue
        missed.append(
            Missed(
                strand=strand.name,
                collective=site.collective,
                kind="reduce_scatter",
                reason=match,
                module=site.module,
            )
        )
    return found, missed


def match_attention(collective: fx.Node) -> AttentionKernel | str:
    """The attention before the projection that a collective sums up, or why there is none."""
    match = match_site(collective)
    if isinstance(match, str):
        return match
    if not isinstance(match, Sum) or len(match.matmuls) != 1:
        return "it does not sum up one matmul"
    chain = [row_operand(match.matmuls[0])]
    while chain[0].target in _RESHAPES:
        chain.insert(0, chain[0].all_input_nodes[0])
    order = _permutation(chain[0])
    output = chain[0].all_input_nodes[0] if order else None
    kernel = output.args[0] if output is not None and output.target is operator.getitem else None
    if not isinstance(kernel, fx.Node) or "attention" not in str(kernel.target):
        return "its matmul does not read attention's output"
    assert output is not None
    return _match_kernel(kernel, (output, *chain), order, match.matmuls[0])


def _match_kernel(
    kernel: fx.Node, chain: tuple[fx.Node, ...], order: list[int], matmul: fx.Node
) -> AttentionKernel | str:
    if kernel.target not in _KERNELS or chain[0].args[1] != 0:
        return f"{kernel.target} is not known to the pass"
    names = [argument.name for argument in kernel.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, kernel.args, strict=False)), **kernel.kwargs}
    query, key = given["query"], given["key"]
    batch, heads, length, size = query.meta["val"].shape
    causal = bool(given.get("is_causal", False))
    scale = given.get("scale")
    operand: Tensor = chain[-1].meta["val"]
    if given.get("dropout_p", 0.0):
        return "it drops attention weights at random"
    if given.get("attn_mask") is not None or given.get("attn_bias") is not None:
        return "it takes a mask tensor"
    if scale is not None and abs(scale - size**-0.5) > 1e-12:
        return f"it scales scores by {scale}, not by 1 / sqrt(head size)"
    if causal and key.meta["val"].shape[2] != length:
        return "its causal mask is not square"
    if order == _BATCH_FIRST and batch > 1:
        return "its rows are not sequence first"
    if order not in (_SEQUENCE_FIRST, _BATCH_FIRST) or operand.shape != (
        batch * length,
        heads * size,
    ):
        return "heads are not joined position by position"
    reason = _read_early(kernel, chain, matmul)
    if reason:
        return reason
    return AttentionKernel(
        kernel=kernel,
        query=query,
        key=key,
        value=given["value"],
        is_causal=causal,
        chain=chain,
    )


def _read_early(kernel: fx.Node, chain: tuple[fx.Node, ...], matmul: fx.Node) -> str:
    """Why the kernel's results cannot be there later than they are, or nothing."""
    for node in (*kernel.users, *chain):
        for user in node.users:
            if user.op != "output" and user not in (*chain, matmul):
                return f"its output is also read by {user.target}"
    sums = chain[0].meta["val"].shape[:-1]
    for result in kernel.users:
        place, value = result.args[1], result.meta["val"]
        if place == 1 and value.shape != sums:
            return "its log-sum-exp is padded"
        is_state = isinstance(value, Tensor) and value.numel() <= _RANDOM_STATE
        if place not in (0, 1) and result.users and not is_state:
            return f"result {place} of {kernel.target} is read"
    return ""


def _permutation(node: fx.Node) -> list[int]:
    """How a node permutes the four dimensions of its input; empty if it does not."""
    if node.target == aten.permute.default:
        order = [int(dim) % 4 for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
        return order if len(order) == 4 else []
    if node.target == aten.transpose.int and node.meta["val"].ndim == 4:
        order = list(range(4))
        one, other = (int(dim) % 4 for dim in node.args[1:])  # type: ignore[arg-type]
        order[one], order[other] = other, one
        return order
    return []


def rewrite_attention(
    strand: StrandGraph, site: Site, variant: str, pieces: int, rank_in_group: int
) -> StrandGraph:
    """Decompose an `attention_scatter` site; changes the graph of `strand`.

    Raises InputError if slices would not consist of whole positions.
    """
    collective = _node(strand, site.collective)
    match = match_attention(collective)
    assert isinstance(match, AttentionKernel), f"{site.collective} has no attention: {match}"
    for row_range in cut_rows(site.rows, pieces, variant):
        if row_range.first % match.batch or row_range.rows % match.batch:
            raise InputError(
                f"{site.rows // match.batch} positions of a rank cannot be cut into slices for "
                f"{variant} with {pieces} pieces",
                hint="set overlap.pieces to a divisor of them, and variant to ring",
            )
    operand = match.chain[-1]
    before = set(operand.users)
    rewrite_scatter(strand, replace(site, kind="matmul_scatter"), variant, pieces, rank_in_group)
    added = [user for user in operand.users if user not in before]
    for node in added:
        if node.target == aten.new_empty.default:  # takes its device only
            node.replace_input_with(operand, match.query)
    slices = sorted(node for node in added if node.target == aten.slice.Tensor)
    writer = GraphWriter(strand.graph, strand.bindings, like=match.query)
    _Buffers(writer, match, slices[0]).fill(slices)
    strand.module.recompile()
    return replace(strand)


class _Buffers:
    """The memory that the slices of an attention fill, and what is read of it."""

    def __init__(self, writer: GraphWriter, attention: AttentionKernel, first: fx.Node) -> None:
        self.writer, self.attention = writer.at(first), attention
        query, self.lse = attention.query, None
        batch, heads, length, size = query.meta["val"].shape
        self.mixed = writer.call(aten.new_empty.default, query, [length, batch, heads, size])
        for result in attention.kernel.users:
            if result.args[1] == 1 and result.users:
                # Laid out as the kernel does it, so that a backward of plain graphs can take it.
                kept = result.meta["val"]
                call, shape, strides = aten.new_empty_strided.default, kept.shape, kept.stride()
                self.lse = writer.call(call, query, [*shape], [*strides], dtype=kept.dtype)

    def fill(self, slices: list[fx.Node]) -> None:
        """Put the attention of its rows in front of each of the projection's `slices`."""
        outputs, sums = [], []
        for node in slices:
            output, lse = self._rows(node)
            outputs.append(output)
            if lse is not None:
                sums.append(lse)
        self._replace(outputs, sums)
        erase_unused([*self.attention.kernel.users, self.attention.chain[-1]])

    def _rows(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Attention of the rows of a slice, in the buffers; the slice becomes a view of them."""
        writer, attention = self.writer.at(node), self.attention
        _, _, first_row, end_row = node.args
        start, stop = first_row // attention.batch, end_row // attention.batch  # type: ignore[operator]
        found = writer.call(
            attention_rows.OPERATOR,
            writer.call(aten.slice.Tensor, attention.query, 2, start, stop),
            attention.key,
            attention.value,
            start,
            attention.is_causal,
        )
        rows = writer.call(operator.getitem, found, 0)
        place = writer.call(aten.slice.Tensor, self.mixed, 0, start, stop)
        by_position = writer.call(aten.permute.default, rows, _SEQUENCE_FIRST)
        output = writer.call(aten.copy_.default, place, by_position)
        shape = list(node.meta["val"].shape)
        node.replace_all_uses_with(writer.call(aten.view.default, output, shape))
        node.graph.erase_node(node)
        if self.lse is None:
            return output, None
        rows_lse = writer.call(operator.getitem, found, 1)
        place = writer.call(aten.slice.Tensor, self.lse, 2, start, stop)
        return output, writer.call(aten.copy_.default, place, rows_lse)

    def _replace(self, outputs: list[fx.Node], sums: list[fx.Node]) -> None:
        """The kernel's results, and views of them, become views of the full buffers; random states,
        which nothing is drawn from, become zeros."""
        last = (sums or outputs)[-1]
        writer = self.writer.after(last)
        mixed = writer.call(filled, self.mixed, *outputs)
        chain = self.attention.chain
        for node in chain:
            if all(user in chain for user in node.users):
                continue
            if node is chain[0]:
                view = writer.call(aten.permute.default, mixed, [1, 2, 0, 3])
            else:
                view = writer.call(aten.view.default, mixed, list(node.meta["val"].shape))
            node.replace_all_uses_with(view, delete_user_cb=lambda user: user not in chain)
        for result in self.attention.kernel.users:
            if result.args[1] == 1 and self.lse is not None:
                result.replace_all_uses_with(writer.call(filled, self.lse, *sums))
            elif result.args[1] > 1 and result.users:  # type: ignore[operator]
                shape, dtype = list(result.meta["val"].shape), result.meta["val"].dtype
                call, like = aten.new_zeros.default, self.attention.query
                result.replace_all_uses_with(writer.call(call, like, shape, dtype=dtype))
        erase_unused([mixed])


def _node(strand: StrandGraph, name: str) -> fx.Node:
    return next(node for node in strand.graph.nodes if node.name == name)
