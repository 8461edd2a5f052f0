"""Plans a toy step without torch: two layers, each with a matmul and a collective.

python examples/toy_plan.py
"""

import sys

from interlace.hardware.computed_costs import MachineModel, analytic_costs
from interlace.ir.graph import COMPUTE_LANE, Kind, Operator, OpGraph
from interlace.ir.plan import Plan, to_text
from interlace.schedules.finder import sequential
from interlace.search.planner import make_plan
from interlace.sim.simulated_step import simulate_step

MICRO_BATCHES = 8
MIB = 2**20


def chain(name: str, matmuls: int) -> OpGraph:
    """For each of two layers: an all-gather, matmuls on what was gathered, a reduce-scatter."""
    operators: list[Operator] = []

    def add(kind: Kind, flops: int = 0, lane: str = COMPUTE_LANE) -> None:
        after = (operators[-1].id,) if operators else ()
        id_, key = f"{kind.value}_{len(operators)}", f"{kind.value} {flops}"
        operators.append(
            Operator(id_, kind, kind.value, lane, after, (), key, 8 * MIB, 8 * MIB, flops)
        )

    for _ in range(2):
        add(Kind.ALL_GATHER, lane="tp")
        for _ in range(matmuls):
            add(Kind.MATMUL, flops=2 * 10**9)
        add(Kind.REDUCE_SCATTER, lane="tp")
    return OpGraph(name, tuple(operators), inputs=(), outputs=(operators[-1].id,))


def main() -> None:
    """Prints the plan, and what it gains over one strand."""
    graphs = {"forward": chain("forward", 2), "backward": chain("backward", 4)}
    machine = MachineModel(
        flops_per_s=1e12, bytes_per_s=50e9, link_bits_per_s=25e9, link_latency_ns=20_000
    )
    costs = analytic_costs(graphs, machine, ranks={"tp": 4})
    plan = make_plan(graphs, costs, "merge")
    print(to_text(plan, graphs))

    def step_ms(each: Plan) -> float:
        return simulate_step(each, graphs, costs, MICRO_BATCHES).length_ns / 1e6

    one, two = step_ms(sequential(graphs)), step_ms(plan)
    print(f"predicted step of {MICRO_BATCHES} micro-batches: {two:.1f} ms, one strand {one:.1f} ms")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
