"""Proves that `interlace train` deals experts to ranks: losses and norms of one rank within float32
rounding, checkpoints that go on with another number of ranks, and what is said of the load."""

from typing import Any

import pytest
from checkpoint_runs import Runs

from interlace.report.build import build_report

STEPS, SAVED = 4, 2
COMMON: dict[str, Any] = {
    "parallel__tensor": 1,
    "model__architecture": "moe",
    "model__layers": 2,
    "model__kv_heads": 2,
    "model__ffn_width": 48,
    "model__experts__count": 4,
    "model__experts__chosen": 2,
    "train__steps": STEPS,
    "train__evaluate_every": SAVED,
    "checkpoint__every": SAVED,
}
ONE = COMMON | {"train__micro_batch_size": 4, "train__evaluate_batches": 1}
TWO: dict[str, Any] = COMMON | {
    "strands": "2",
    "plan__trial_steps": 0,
    "parallel__data_shard": 2,
    "parallel__expert": 2,
    "train__evaluate_batches": 2,
}
FOUR: dict[str, Any] = COMMON | {
    "train__evaluate_batches": 2,
    "train__recompute": "layer",
    "parallel__data_replicate": 2,
    "parallel__expert": 2,
    "parallel__tensor": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One rank, whose micro-batch has as many sequences as those of all ranks; and two."""
    runs = Runs(tmp_path_factory.mktemp("experts"))
    runs.train("one", 1, **ONE)
    runs.train("two", 2, **TWO)
    return runs


def numbers(runs: Runs, out: str) -> list[float]:
    """Losses, norms of all gradients, and losses of held-out text."""
    steps = [event[key] for event in runs.events(out, "step") for key in ("loss", "grad_norm")]
    return [*steps, *(event["loss"] for event in runs.events(out, "evaluate"))]


def test_losses_and_norms_are_those_of_one_rank(runs: Runs) -> None:
    """ZeRO-3 over the ranks of the experts; and two replicas of two, with tensor parallelism."""
    runs.train("four", 4, **FOUR)
    for out in ("two", "four"):
        assert numbers(runs, out) == pytest.approx(numbers(runs, "one"), rel=1e-5)


def test_checkpoints_go_on_with_other_ranks_for_experts(runs: Runs) -> None:
    """Two ranks saved: one rank goes on, and four, each with one expert, and two without them."""
    source = runs.checkpoint("two", SAVED)
    four = COMMON | {"train__micro_batch_size": 1}
    for out, ranks, settings in (
        ("alone", 1, ONE),
        ("each", 4, four | {"parallel__data_replicate": 4, "parallel__expert": 4}),
        ("whole", 2, TWO | {"parallel__expert": 1}),
    ):
        runs.train(out, ranks, **settings | {"checkpoint__every": 0, "checkpoint__resume": source})
        assert runs.losses(out) == pytest.approx(runs.losses("one")[SAVED:], rel=1e-5)


def test_the_load_of_experts_is_written_and_drawn(runs: Runs) -> None:
    for out in ("one", "two"):
        for event in runs.events(out, "step"):
            assert sum(event["expert_load"]) == pytest.approx(1, abs=1e-4)
            assert 1 <= event["expert_imbalance"] <= 2
            assert event["expert_dropped"] == 0
    loads = [[event["expert_load"] for event in runs.events(out, "step")] for out in ("one", "two")]
    assert loads[0][0] == pytest.approx(loads[1][0], abs=1e-6)
    page = build_report(runs.folder / "two")[0].read_text()
    assert "Load of each expert over steps" in page
    assert "no choice was dropped" in page


def test_what_does_not_go_together_is_refused_with_its_numbers(runs: Runs) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"parallel__data_shard": 3, "parallel__expert": 3}, "count = 4 experts cannot be dealt"),
        ({"parallel__expert": 2}, "does not fit into the 1 ranks"),
        ({"parallel__pipeline": 2, "parallel__data_shard": 2, "parallel__expert": 2}, "stage"),
        ({"model__experts__balance": "bias", "model__experts__router": "sigmoid"}, "biases"),
    ]
    for number, (settings, said) in enumerate(wrong):
        result = runs.train(f"wrong{number}", 1, **COMMON | settings)[0]
        assert said in result.value["error"], result.value
