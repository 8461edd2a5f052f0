"""Modules that this project did not write: the numbers of eager PyTorch, or a refusal by name.

Every row of the tables in `strange_modules.py` and `strange_layouts.py` runs on one rank and on
two, with one strand and with two; `strange_world.py` says what is compared.
"""

import re

import pytest
import strange_layouts
import strange_modules
import torch
from processes import gloo_group, run_ranks
from strange_world import RIGHT, Case, mesh_of, outcomes

CASES = [*strange_modules.CASES, *strange_layouts.CASES]


def every_case(names: list[str]) -> dict[str, list[str]]:
    """In a rank: what comes of each case."""
    torch.set_num_threads(1)
    with gloo_group():
        return {
            case.name: outcomes(case, mesh_of(case))
            for case in CASES
            if not names or case.name in names
        }


pytestmark = pytest.mark.timeout(900)  # the first test waits for all modules on 1 and 2 ranks


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, list[str]]]]:
    """Outcomes by number of ranks, by rank, by case."""
    results = {}
    for ranks in (1, 2):
        done = run_ranks("test_strange_modules:every_case", ranks, args=[[]], timeout_s=400)
        results[ranks] = [result.value for result in done]
    return results


def test_the_tables_are_large() -> None:
    """No row hides behind another's name, and nobody thins them out unseen."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) >= 60


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
