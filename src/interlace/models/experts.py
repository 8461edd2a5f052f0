"""The experts of a mixture-of-experts layer: SwiGLU feed-forwards, of which each token takes K.

Letters: N tokens, K experts per token, D width, F inner width, E experts (of a rank: L, under
expert parallelism, which replaces `exchange` and cuts the weights: `interlace.parallel.expert`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.experts.between_ranks import host_counts
from interlace.experts.grouped import grouped_matmul
from interlace.experts.merged_sends import (
    expected_sends,
    merged_sends,
    rows_of_sends,
    sends_of_rows,
    sends_of_tokens,
    tokens_of_sends,
)
from interlace.experts.rows_by_expert import expert_order, rows_of_tokens, tokens_of_rows


class RowExchange(nn.Module):
    """How rows come to the ranks of their experts. As it is, for experts of which a rank has all:
    rows stay."""

    ranks: int = 1
    """Over how many ranks experts are dealt."""
    merged: bool = False
    """Whether a token is sent once to each rank, for all of its experts there."""

    def counts(self, sent_E: Tensor) -> Tensor:
        """[2, E] in the memory of the host: rows that this rank has for each expert, and rows that
        each rank has for this rank's experts."""
        return host_counts(sent_E, sent_E)

    def to_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert -> rows of this rank's experts."""
        return rows

    def sends_to_ranks(self, sends: Tensor, merged: Tensor) -> Tensor:
        """Sends of this rank -> those that arrive (`interlace.experts.merged_sends`)."""
        return sends

    def sends_back(self, sends: Tensor, merged: Tensor) -> Tensor:
        """The way back."""
        return sends

    def to_tokens(self, rows: Tensor, counts: Tensor, token_rows: int) -> Tensor:
        """The way back."""
        return rows


class ExpertLayer(nn.Module):
    """Experts of any kind: rows go to their experts, which `on_rows` computes, and back."""

    count: int
    """Experts of the layer, those of other ranks too."""
    exchange: RowExchange

    def on_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[M, D] -> [M, D]: each row by its expert; `counts` are those of `RowExchange.counts`.
        Under expert parallelism M is known at run time only (`interlace.graphs.ragged`)."""
        raise NotImplementedError

    def dispatched(self, x_ND: Tensor, ids_NK: Tensor, gates_NK: Tensor) -> Tensor:
        """[N, D]: the sum of the outputs of each token's experts, weighted by its gates.

        `ids_NK` are numbers of experts; `count` stands for none (the row was dropped and adds 0).
        """
        tokens, per_token = ids_NK.shape
        exchange = self.exchange
        order, place, sent_E = expert_order(ids_NK, self.count)
        if exchange.merged:
            return self._merged(x_ND, ids_NK, gates_NK, order, place, exchange.counts(sent_E))
        counts = exchange.counts(sent_E)
        rows = exchange.to_experts(rows_of_tokens(x_ND, order, place, per_token), counts)
        out = self.on_rows(rows, counts)
        back = exchange.to_tokens(out, counts, tokens * per_token)
        rows_NKD = tokens_of_rows(back, order, place).view(tokens, per_token, -1)
        return (rows_NKD * gates_NK.unsqueeze(2)).sum(1).to(x_ND.dtype)

    def _merged(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        gates_NK: Tensor,
        order: Tensor,
        place: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """`dispatched` with one send for each rank; gates go along, as sums are weighted there."""
        (tokens, per_token), exchange, ranks = ids_NK.shape, self.exchange, self.exchange.ranks
        token, place_NP, sent_R, of_rows = merged_sends(ids_NK, order, self.count, ranks)
        merged = exchange.counts(sent_R)
        nominal = expected_sends(tokens, per_token, self.count, ranks)
        of_rows = exchange.to_experts(of_rows, counts)
        gates = rows_of_tokens(gates_NK.reshape(-1, 1), order, place, 1)
        gates = exchange.to_experts(gates, counts)
        sends = sends_of_tokens(x_ND, token, place_NP, merged, nominal)
        sends = exchange.sends_to_ranks(sends, merged)
        rows = rows_of_sends(sends, of_rows, counts, merged, ranks, tokens * per_token)
        out = self.on_rows(rows, counts) * gates
        back = sends_of_rows(out, of_rows, counts, merged, ranks, nominal).to(x_ND.dtype)
        return tokens_of_sends(exchange.sends_back(back, merged), token, place_NP, merged)


class Experts(ExpertLayer):
    """`count` experts without biases: down(silu(gate(x)) * up(x)), each on its own tokens.

    Weights lie as those of `nn.Linear` do, [E, F, D] and [E, D, F]. Nothing is padded or dropped:
    an expert computes exactly the rows that were routed to it.
    """

    def __init__(self, count: int, width: int, ffn_width: int) -> None:
        super().__init__()
        self.count = count
        self.gate = nn.Parameter(torch.empty(count, ffn_width, width))
        self.up = nn.Parameter(torch.empty(count, ffn_width, width))
        self.down = nn.Parameter(torch.empty(count, width, ffn_width))
        self.exchange = RowExchange()
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x_ND: Tensor, ids_NK: Tensor, gates_NK: Tensor) -> Tensor:
        """As in `dispatched`."""
        return self.dispatched(x_ND, ids_NK, gates_NK)

    def on_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As in `ExpertLayer`."""
        ranks = self.exchange.ranks
        gated = F.silu(grouped_matmul(rows, self.gate, counts, ranks))
        inner = gated * grouped_matmul(rows, self.up, counts, ranks)
        return grouped_matmul(inner, self.down, counts, ranks)
