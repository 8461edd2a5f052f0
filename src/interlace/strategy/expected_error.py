"""How far off a simulated step may be: what `interlace bench simulator` finds on published steps.

The figures are the mean errors of rows that the fit did not see, with nothing fitted, of the source
nearest to the device; `docs/concepts/simulation.md` has all of them. Two strands on one stage and
folded are held against DHelix's factors over one strand, ZB-H1 and ZB-H2 against zero bubble's
steps. No row has ZB-V, DualPipeV or others, so the error of those is not known.
"""

from dataclasses import dataclass

from interlace.hardware.cluster import Cluster
from interlace.schedules.finder import split_options

ERRORS: dict[str, tuple[float, str]] = {
    "A100": (0.074, "vTrain, A100-SXM"),
    "H100": (0.153, "torchtitan, H100-96G"),
    "B200": (0.060, "SimuMax, B200-SXM"),
    "GH200": (0.583, "Sailor, GH200-96G"),
}
"""By class of GPU: error of held-out rows with nothing fitted, and of which source. torchtitan's
rows are those of a program like the trainer's: PyTorch's own operators on H100."""
FACTOR_POINTS = 4.4
"""Mean error of the simulated factors, in points: 1.40 for 1.31 are 9."""
_FACTORS = (
    f";\n  the gain of two strands: {FACTOR_POINTS:.0f} points off (DHelix, 15 rows on A40 "
    "and A800, interlace bench simulator)"
)
_PUBLISHED = {
    "one_strand": "",
    "one_f_one_b": "",
    "interleaved": "",
    "gpipe": "",
    "zb_h1": ";\n  steps of zb_h1 are 5 % off (Zero Bubble, 12 rows on A100)",
    "zb_h2": ";\n  steps of zb_h2 are 8 % off (Zero Bubble, 12 rows on A100)",
    "two_strand": _FACTORS,
    "folded": _FACTORS,
}
"""Schedules that published rows have, and what is known of them beside the error of a step: rows of
two strands are factors over one."""


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """What is known of the error."""

    share: float | None
    """None if no row was measured on such a device."""
    text: str


def expected_error(cluster: Cluster, schedule: str) -> ExpectedError:
    """On a cluster, for a schedule."""
    share, source = ERRORS.get(cluster.gpu, (None, ""))
    if share is None:
        text = "expected error: not known, no published step on such a device was compared"
    else:
        text = (
            f"expected error: {100 * share:.0f} % of the step ({source}, interlace bench simulator)"
        )
    name, _ = split_options(schedule)
    text += _PUBLISHED.get(name, f";\n  the gain of {name} was not held against published steps")
    return ExpectedError(share, text)
