"""A pass with its collectives cut into sends under partial matmuls (CommFuse, arXiv 2604.24013)."""

from dataclasses import replace

from interlace.explain.pass_graphs import PassGraph, TracedSite
from interlace.ir.graph import Kind, Operator, OpGraph

_MOST_PARTS = 8
"""Parts into which a matmul is cut at most; a choice, as smaller matmuls run slower and the trace
does not say by how much."""


def decomposed(before: PassGraph) -> PassGraph:
    """The pass with every site cut. A matmul becomes a part for each of N ranks (8 at most), its
    collective N - 1 sends. A gathering matmul begins with the part that needs no send; a scattering
    one ends with the part that is not sent. Parts take 1 / N of the matmul's time, sends
    1 / (N - 1) of the collective's."""
    gathers = {site.collective: site for site in before.sites if site.gathers}
    scatters = {site.collective: site for site in before.sites if not site.gathers}
    matmuls = {site.matmul: site for site in before.sites}
    operators: list[Operator] = []
    solo: dict[str, int] = {}
    renamed: dict[str, tuple[str, ...]] = {}

    def add(op: Operator, name: str, inputs: tuple[str, ...], ns: int) -> None:
        operators.append(replace(op, id=name, inputs=inputs))
        solo[name] = ns

    for op in before.graph.operators:
        inputs = tuple(new for old in op.inputs for new in renamed.get(old, (old,)))
        ns = before.solo_ns[op.id]
        if op.id in gathers or op.id in scatters:
            site = (gathers | scatters)[op.id]
            sends = _parts(site) - 1
            names = tuple(f"{op.id}_{i}" for i in range(1, sends + 1))
            for i, name in enumerate(names):
                sources = inputs if site.gathers else (f"{site.matmul}_{i}",)
                add(replace(op, kind=Kind.SEND), name, sources, ns // sends)
            renamed[op.id] = names
        elif op.id in matmuls:
            site = matmuls[op.id]
            parts = _parts(site)
            waits = set(renamed.get(site.collective, ())) if site.gathers else set()
            for i in range(parts):
                sources = tuple(name for name in inputs if name not in waits)
                sources = (f"{op.id}_{i - 1}",) if i else sources
                if i and site.gathers:
                    sources = (*sources, f"{site.collective}_{i}")
                add(op, f"{op.id}_{i}", sources, ns // parts)
            renamed[op.id] = (f"{op.id}_{parts - 1}",)
        else:
            add(op, op.id, inputs, ns)
    graph = OpGraph(before.graph.name, _early(operators), (), ())
    return PassGraph(graph, solo, ())


def most_ns(before: PassGraph) -> int:
    """At most so much of the exposed time of a pass can decomposition hide: for each site the
    smaller of what is exposed and (N - 1) / N of its matmul, since one of N parts has no send
    beside it."""
    found = 0
    for site in before.sites:
        beside = before.solo_ns[site.matmul] * (site.ranks - 1) // site.ranks
        found += min(site.exposed_ns, beside)
    return found


def _parts(site: TracedSite) -> int:
    return min(site.ranks, _MOST_PARTS)


def _early(operators: list[Operator]) -> tuple[Operator, ...]:
    """Each send directly behind the last operator that it waits for, so that the order as it stands
    sends early."""
    found: list[Operator] = []
    sends: dict[str, list[Operator]] = {}
    ids = {op.id for op in operators}
    first: list[Operator] = []
    for op in operators:
        if op.kind == Kind.SEND and op.is_collective and len(op.inputs) == 1:
            sends.setdefault(op.inputs[0], []).append(op)
        else:
            first.append(op)
    for op in first:
        found.append(op)
        waiting = [op.id]
        while waiting:
            for send in sends.pop(waiting.pop(0), ()):
                found.append(send)
                waiting.append(send.id)
    assert {op.id for op in found} == ids
    return tuple(found)
