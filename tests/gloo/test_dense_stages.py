"""Llama and GPT in the stages of a pipeline, in float64: losses and gradients of every parameter
against one process, beside shared sequences and shared weights, also in stages of unlike layout.

`make test` has each way to share once; wide are the same with the other model, and six ranks."""

from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks
from stage_gradients import check
from training import Workplace

from wide import WIDE

SETTINGS: dict[str, Any] = {
    "strands": "2",
    "model.width": 32,
    "model.ffn_width": 24,
    "parallel.tensor": 1,
    "parallel.pipeline": 2,
    "train.micro_batches": 4,
    "train.micro_batch_size": 1,
    "data.sequence_length": 16,
    "plan.cluster": "laptop",  # nothing is measured
}
LLAMA: dict[str, Any] = {"model.architecture": "llama", "model.kv_heads": 2}
GPT: dict[str, Any] = {"model.architecture": "gpt"}
CONTEXT: dict[str, Any] = {"parallel.context": 2}
ZERO3: dict[str, Any] = {"parallel.data_shard": 2}
ZERO1: dict[str, Any] = {"parallel.data_shard": 2, "parallel.zero": 1}
UNLIKE: dict[str, Any] = {
    "pipeline.schedule": "one_f_one_b", "pipeline.stages": "tensor=2,data_shard=2",
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    LLAMA | CONTEXT | {"pipeline.schedule": "zb_v"},
    GPT | ZERO3 | {"pipeline.schedule": "one_f_one_b"},
    LLAMA | ZERO1 | {"pipeline.schedule": "one_f_one_b"},
    GPT | UNLIKE | {"parallel.zero": 3},
]
OTHERS: list[dict[str, Any]] = [
    GPT | CONTEXT | {"pipeline.schedule": "folded"},
    LLAMA | ZERO3 | {"pipeline.schedule": "dual_pipe_v"},
    GPT | ZERO1 | {"pipeline.schedule": "zb_h1"},
    LLAMA | UNLIKE | {"parallel.zero": 1},
]
OF_SIX: list[dict[str, Any]] = [
    LLAMA | CONTEXT | {"pipeline.schedule": "one_f_one_b", "pipeline.stages": "tensor=1,tensor=2"},
]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(4, CASES, id="4"),
        pytest.param(4, OTHERS, marks=WIDE, id="4, wide"),
        pytest.param(6, OF_SIX, marks=WIDE, id="6"),
    ],
)
def test_gradients_are_those_of_one_process(
    tmp_path: Path, ranks: int, settings: list[dict[str, Any]]
) -> None:
    """Within 1e-10 of the largest element of each."""
    work = Workplace(tmp_path)
    cases = [SETTINGS | case for case in settings]
    results = run_ranks(
        "stage_gradients:child", ranks, args=[str(work.folder), cases], timeout_s=200,
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    for number, case in enumerate(settings):
        check([result.value[number] for result in results], case)
