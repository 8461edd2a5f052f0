"""What a link in use does to transfers, from times that are given: which lanes stand in another's
queue, and what a transfer takes right behind one. No processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from interlace.ir.costs import CostTable, cost_of
from interlace.ir.graph import Kind, Operator, OpGraph
from interlace.measure import start_up

ROWS_NS, COUNTS_NS, SUM_NS = 12_000_000, 1_500_000, 9_000_000
"""Alone."""


def operator(name: str, lane: str, size: int, key: str) -> Operator:
    return Operator(name, Kind.ALL_TO_ALL, "t", lane, (), (), key, size, size, 0)


@dataclass
class Stub:
    """A profiler whose collectives are called by their keys."""

    operators: tuple[Operator, ...]
    clock: Any = None
    asked: list[str] = field(default_factory=list)

    @property
    def graphs(self) -> dict[str, OpGraph]:
        return {"forward": OpGraph("forward", self.operators, (), ())}

    def capture(self, keys: Sequence[str]) -> "Stub":
        self.asked += keys
        return self

    @property
    def collectives(self) -> dict[str, str]:
        return {key: key for key in self.asked}


MOE = (
    *(operator(f"rows_{n}", "ep", 400_000, "rows") for n in range(4)),
    *(operator(f"counts_{n}", "ep_counts", 64, "counts") for n in range(2)),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CostTable]:
    """The table of these operators, where a short transfer takes so long beside a long one, and
    rows so long right behind rows."""

    def table(
        operators: tuple[Operator, ...], beside_ns: int, in_a_row_ns: int = ROWS_NS
    ) -> CostTable:
        monkeypatch.setattr(
            start_up, "in_a_row_ns", lambda _, key: in_a_row_ns if key == "rows" else SUM_NS
        )
        monkeypatch.setattr(start_up, "beside_ns", lambda *_: beside_ns)
        monkeypatch.setattr(start_up, "quickest_ns", lambda *_: COUNTS_NS)
        alone = {"rows": ROWS_NS, "counts": COUNTS_NS, "sum": SUM_NS}
        costs = {op.key: cost_of(op, alone[op.key]) for op in operators}
        stub: Any = Stub(operators)
        return start_up.on_busy_links(stub, CostTable(operators=costs, source="profile"))

    return table


def test_counts_stand_behind_rows(measured: Callable[..., CostTable]) -> None:
    """They waited for a third of the rows, and so keep their time alone and stand in the queue."""
    table = measured(MOE, COUNTS_NS + ROWS_NS // 3, ROWS_NS + 2_000_000)
    assert table.queues == {"ep_counts": "ep"}
    assert table.behind_ns == {"rows": 2_000_000}
    assert table.operators["counts"].solo_ns == COUNTS_NS
    assert table.operators["rows"].solo_ns == ROWS_NS
    assert table.contention.link_of("ep_counts") == "ep"


def test_counts_whose_packets_take_turns_with_rows(measured: Callable[..., CostTable]) -> None:
    """Twice their time alone: no queue, and that is what they take."""
    table = measured(MOE, 2 * COUNTS_NS)
    assert not table.queues
    assert not table.behind_ns
    assert table.operators["counts"].solo_ns == 2 * COUNTS_NS


def test_rows_that_are_not_longer_behind_others(measured: Callable[..., CostTable]) -> None:
    """In the profiled step they also took what the other rank was late by: nothing is added."""
    assert not measured(MOE, 2 * COUNTS_NS, ROWS_NS - 1_000_000).behind_ns


def test_a_lane_with_long_transfers_of_its_own_has_its_own_queue(
    measured: Callable[..., CostTable],
) -> None:
    """What is short on it takes what it took beside the others."""
    long = operator("sum", "ep_counts", 300_000, "sum")
    table = measured((*MOE, long), COUNTS_NS + ROWS_NS // 3)
    assert not table.queues
    assert table.operators["counts"].solo_ns == COUNTS_NS + ROWS_NS // 3
    assert table.operators["sum"].solo_ns == SUM_NS
