"""CostTable: how long each operator takes alone, in integer nanoseconds.

Operators with equal keys cost the same, so a table for a deep model is short. A table says
where its numbers come from; a planner never mixes sources.
"""

import hashlib
import json
from dataclasses import dataclass

from interlace.errors import InputError
from interlace.ir.graph import OpGraph


@dataclass(frozen=True, slots=True)
class CostTable:
    """Solo times by operator key."""

    solo_ns: dict[str, int]
    source: str
    """`profile` or the name of the model that gave the times."""
    issue_ns: int = 0
    """Time for which starting one collective holds the compute lane."""
    graph_digest: str = ""
    machine: str = ""

    def of(self, graph: OpGraph) -> dict[str, int]:
        """Time of each operator of `graph` by its id.

        Raises InputError when the table lacks an operator: it belongs to another graph.
        """
        missing = sorted({op.key for op in graph.operators} - set(self.solo_ns))
        if missing:
            raise InputError(
                f"the cost table has no time for {len(missing)} operators of graph "
                f"{graph.name!r}, the first is {missing[0]!r}",
                hint="profile this graph on this machine again",
            )
        return {op.id: self.solo_ns[op.key] for op in graph.operators}

    @property
    def digest(self) -> str:
        """A hash of the times; ranks that planned from the same times have the same one."""
        text = json.dumps([self.source, self.issue_ns, sorted(self.solo_ns.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
