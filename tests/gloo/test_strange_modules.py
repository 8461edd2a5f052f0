"""Modules that this project did not write: the numbers of eager PyTorch, or a refusal by name.

Every row of the tables in `strange_modules.py` and `strange_layouts.py` runs on one rank and on
two, with one strand and with two; `strange_world.py` says what is compared.

`make test` runs whole modules on one rank, a few of them as copies on two, and layouts on two
ranks. Wide are the others as copies, layouts on one rank, and modules and layouts that differ from
another row by their operators alone: `OPERATORS`.
"""

import re

import pytest
import strange_layouts
import strange_modules
import torch
from processes import gloo_group, run_ranks
from strange_world import RIGHT, Case, mesh_of, outcomes

from wide import asked, wide_unless

CASES = [*strange_modules.CASES, *strange_layouts.CASES]
OPERATORS = {
    "attention, batch first", "decoder layer", "pictures, channels last", "transposed convolution",
    "bilinear", "bag of words", "orthogonal", "GRU", "one column", "own gradient", "sine and sums",
    "Fourier", "sorted", "without sequence parallelism", "Qwen3 without sequence parallelism",
    "table by columns", "distributed by rows", "distributed convolution", "bfloat16 split",
}  # fmt: skip
"""Rows beside which another one takes the same way: attention beside `attention with weights`, a
fast operator beside slow ones, columns beside rows."""
COPIES = {
    "encoder layer", "pictures, in turn", "tied head, padding", "frozen, unused, twice",
    "replaced buffer", "evaluated later", "running statistics",
}  # fmt: skip
"""Whole modules that `make test` has on two ranks too."""


def every_case(names: list[str]) -> dict[str, list[str]]:
    """In a rank: what comes of each case."""
    torch.set_num_threads(1)
    with gloo_group():
        return {case.name: outcomes(case, mesh_of(case)) for case in CASES if case.name in names}


pytestmark = pytest.mark.timeout(900)  # the first test waits for all modules on 1 and 2 ranks


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[int, list[dict[str, list[str]]]]:
    """Outcomes by number of ranks, by rank, by case that was asked for."""
    results = {}
    for ranks in (1, 2):
        names = [case.name for case in asked(request, "case", ranks=ranks)]
        done = run_ranks("test_strange_modules:every_case", ranks, args=[names], timeout_s=400)
        results[ranks] = [result.value for result in done]
    return results


def test_the_tables_are_large() -> None:
    """No row hides behind another's name, and nobody thins them out unseen."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) >= 60
    assert {case.name for case in CASES} >= OPERATORS | COPIES


def is_quick(case: Case, ranks: int) -> bool:
    if case.name in OPERATORS:
        return False
    if case.lay_out is None:
        return ranks == 1 or case.name in COPIES
    return ranks == 2


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=wide_unless(is_quick(case, ranks)))
        for ranks in (1, 2)
        for case in CASES
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_right_or_refused(
    case: Case, ranks: int, found: dict[int, list[dict[str, list[str]]]]
) -> None:
    """With one and with two strands, on every rank. On one rank a layout over ranks may be right
    that is refused on two."""
    for of_rank in found[ranks]:
        for outcome in of_rank[case.name]:
            may_be_right = not case.refused or (ranks == 1 and case.lay_out is not None)
            if may_be_right and outcome == RIGHT:
                continue
            assert outcome.startswith("refused: "), outcome
            assert case.refused, outcome
            assert "hint: " in outcome, outcome
            if not may_be_right:
                assert re.search(case.refused, outcome), outcome
