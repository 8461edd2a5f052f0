"""What was decomposed and what was not, as a list of every collective of a run's graphs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from interlace.decompose.choose import Choice
from interlace.decompose.sites import Missed
from interlace.graphs.collectives import is_collective, kind_of_collective
from interlace.graphs.trace import StrandGraph

_PASSES = {"all": "", "ends": " in the first forward and the last backward of a step"}
"""How the summary says where decomposed graphs run, by `overlap.passes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Every collective that was there before decomposition, in one of two lists."""

    choices: tuple[Choice, ...]
    """Sites, decomposed or left whole."""
    missed: tuple[Missed, ...]
    """Collectives that are no sites."""
    passes: Literal["all", "ends"] = "all"
    """Of a step; `ends` are its first forward and its last backward."""
    misfit: str = ""
    """Why the ends alone cannot be decomposed, where the run was to choose between both."""

    @property
    def decomposed(self) -> int:
        """How many sites run slice by slice."""
        return sum(bool(choice.variant) for choice in self.choices)

    def summary(self) -> str:
        """`decomposed 8 of 9 sites (ring 8); 12 of 21 collectives are no sites`."""
        variants = Counter(choice.variant for choice in self.choices if choice.variant)
        how = ", ".join(f"{name} {count}" for name, count in sorted(variants.items()))
        pairs = sum(bool(choice.site.back) for choice in self.choices)
        total = len(self.choices) + pairs + len(self.missed)
        where = f" in all passes, as {self.misfit}" if self.misfit else _PASSES[self.passes]
        return (
            f"decomposed {self.decomposed} of {len(self.choices)} sites"
            f"{f' ({how})' if how else ''}{where}; "
            f"{len(self.missed)} of {total} collectives are no sites"
        )

    def lines(self) -> list[str]:
        """The summary, and under it one line for all collectives that are alike."""
        rows = Counter(_site_text(choice) for choice in self.choices)
        rest = Counter(
            f"{each.strand} {each.kind} {_numberless(each.module)}: {each.reason}"
            for each in self.missed
        )
        return [
            self.summary(),
            *(f"  {count:>4} x {text}" for text, count in rows.items()),
            *(f"  {count:>4} x not {text}" for text, count in rest.items()),
        ]

    def as_dict(self) -> dict[str, object]:
        """For JSON: all choices with their sites, and all that were missed."""
        return {
            "summary": self.summary(),
            "decomposed": self.decomposed,
            "passes": self.passes,
            "misfit": self.misfit,
            "sites": [asdict(choice) for choice in self.choices],
            "missed": [asdict(each) for each in self.missed],
        }


def _site_text(choice: Choice) -> str:
    site = choice.site
    how = f"{choice.variant}, pieces {choice.pieces}" if choice.variant else "plain"
    if choice.plain_ns and choice.variant:
        how += f" ({choice.plain_ns / 1e6:.3g} -> {choice.chosen_ns / 1e6:.3g} ms)"
    return (
        f"{site.strand} {site.kind} {_numberless(site.module)}: {site.ranks} ranks x {site.rows} "
        f"rows, {how}{f': {choice.reason}' if choice.reason else ''}"
    )


def _numberless(module: str) -> str:
    """`blocks.*.ffn.gate` for `blocks.3.ffn.gate`: layers are listed together."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def with_others(
    listing: Listing, graphs: Mapping[str, StrandGraph], before: Iterable[str], reason: str
) -> Listing:
    """`listing` with the collectives of `graphs` that are not among the names `before`, which a
    later pass put in for the `reason`."""
    known = frozenset(before)
    others = [
        Missed(
            strand=strand.name,
            collective=node.name,
            kind=str(kind_of_collective(node.target, node.args)),
            reason=reason,
        )
        for strand in graphs.values()
        for node in strand.graph.nodes
        if is_collective(node) and f"{strand.name}.{node.name}" not in known
    ]
    return replace(listing, missed=(*listing.missed, *others))
