"""Proves that the tables by which a merge keeps within a memory bound never count too little."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir.graph import OpGraph
from interlace.search.chains import Chain, split
from interlace.search.job_memory import Room
from interlace.search.memory import Alive, Liveness
from interlace.search.problem import Problem
from strategies import pair_graphs, solo_times


def walk(chains: list[Chain], room: Room, values: Liveness, draw: random.Random) -> int:
    """Issue pieces and fillers at random; by how much, at most, the bytes alive are above what the
    tables say."""
    alive, at = Alive(values), [[0, 0] for _ in chains]
    little = 0
    while True:
        moves = [
            (k, which)
            for k, chain in enumerate(chains)
            for which, todo in enumerate((chain.pieces, chain.fillers))
            if at[k][which] < len(todo)
            and (which == 0 or chain.fillers[at[k][1]].release <= at[k][0])
        ]
        if not moves:
            return little
        k, which = draw.choice(moves)
        source = (chains[k].pieces, chains[k].fillers)[which][at[k][which]]
        said = [t.alive[p][f] for t, (p, f) in zip(room.tables, at, strict=True)]
        if which:
            said[k] += room.tables[k].filler[at[k][1]]
        else:
            said[k] = room.tables[k].piece[at[k][0]][at[k][1]]
        seen = max(alive.issue(values.number[name]) for name in source.operators)
        at[k][which] += 1
        little = max(little, seen - (sum(said) - room.free))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), graph=pair_graphs(operators=(1, 8)), seed=st.integers(0, 999))
def test_tables_never_count_too_little(data: st.DataObject, graph: OpGraph, seed: int) -> None:
    """At every moment, whatever the order of pieces and fillers."""
    problem = Problem(graph, data.draw(solo_times(graph)))
    chains, values = split(problem, data.draw(st.integers(1, 40))), Liveness(graph)
    room = Room.within(0, chains, values)
    assert walk(chains, room, values, random.Random(seed)) == 0
