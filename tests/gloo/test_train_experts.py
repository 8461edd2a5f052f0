"""Proves that `interlace train` deals experts to ranks: losses and norms of one rank within float32
rounding, checkpoints that go on with another number of ranks, and what is said of the load.

`make test` has two ranks, two stages of two, and what goes on or begins on one rank or two; wide
are the other numbers of ranks and stages, and biases of routers in stages and behind a checkpoint;
`test_expert_layouts.py` and `test_expert_stages.py` hold such layouts in float64."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_runs import Runs, child

from interlace.checkpoint.manifest import BUFFERS
from interlace.checkpoint.tensor_files import CheckpointReader, whole_tensor
from interlace.checkpoint.to_hugging_face import export_checkpoint, sound_manifest
from interlace.report.build import build_report
from interlace.run_files import RENEW_PLAN
from interlace.train.metrics import MetricsWriter
from interlace.train.renewal import STEPS as DRIFT_STEPS
from interlace.train.renewal import Drift
from wide import WIDE

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
STAGES: dict[str, Any] = {
    "strands": "2",
    "parallel__pipeline": 2,
    "pipeline__schedule": "one_f_one_b",
}
STAGED: dict[str, Any] = TWO | STAGES
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
    runs.train("staged", 4, **STAGED)
    return runs


def numbers(runs: Runs, out: str) -> list[float]:
    """Losses, norms of all gradients, and losses of held-out text."""
    steps = [event[key] for event in runs.events(out, "step") for key in ("loss", "grad_norm")]
    return [*steps, *(event["loss"] for event in runs.events(out, "evaluate"))]


def biases(runs: Runs, out: str) -> dict[str, torch.Tensor]:
    """Those of routers, in the last checkpoint of a run."""
    reader = CheckpointReader(runs.checkpoint(out, STEPS))
    names = sound_manifest(runs.checkpoint(out, STEPS)).tensors
    return {name: whole_tensor(reader, name) for name in names if name.startswith(BUFFERS)}


@pytest.mark.parametrize("out", ["two", "staged", pytest.param("four", marks=WIDE)])
def test_losses_and_norms_are_those_of_one_rank(runs: Runs, out: str) -> None:
    """ZeRO-3 over the ranks of the experts; two stages of two, with ZeRO-3; and two replicas of
    two, with tensor parallelism."""
    if out == "four":
        runs.train(out, 4, **FOUR)
    assert numbers(runs, out) == pytest.approx(numbers(runs, "one"), rel=1e-5)


EACH = {
    "train__micro_batch_size": 1, "parallel__data_replicate": 4, "parallel__expert": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("out", "ranks", "source", "settings"),
    [
        ("alone", 1, "staged", ONE),
        ("stages of one", 2, "two", ONE | STAGES),
        pytest.param("each", 4, "staged", COMMON | EACH, marks=WIDE),
        pytest.param("whole", 2, "two", TWO | {"parallel__expert": 1}, marks=WIDE),
        pytest.param("stages of two", 4, "two", STAGED | {"parallel__zero": 1}, marks=WIDE),
        pytest.param("as many stages", 2, "staged", ONE | STAGES, marks=WIDE),
    ],
)
def test_checkpoints_go_on_with_other_ranks_for_experts(
    runs: Runs, out: str, ranks: int, source: str, settings: dict[str, Any]
) -> None:
    """Two ranks saved, and two stages of two each: one rank goes on, and four, each with an expert
    of four, two without them, and other numbers of stages. ZeRO is there on one side or both."""
    resume = {"checkpoint__every": 0, "checkpoint__resume": runs.checkpoint(source, SAVED)}
    runs.train(out, ranks, **settings | resume)
    assert runs.losses(out) == pytest.approx(runs.losses("one")[SAVED:], rel=1e-5)


def test_the_load_of_experts_is_written_and_drawn(runs: Runs) -> None:
    for out in ("one", "two", "staged"):
        for event in runs.events(out, "step"):
            assert sum(event["expert_load"]) == pytest.approx(1, abs=1e-4)
            assert 1 <= event["expert_imbalance"] <= 2
            assert event["expert_dropped"] == 0
    wanted = runs.events("one", "step")[0]["expert_load"]
    for out in ("two", "staged"):
        assert runs.events(out, "step")[0]["expert_load"] == pytest.approx(wanted, abs=1e-6)
    page = build_report(runs.folder / "two")[0].read_text()
    assert "Load of each expert over steps" in page
    assert "no choice was dropped" in page


def test_recorded_steps_say_what_exchanges_and_uneven_load_cost(runs: Runs) -> None:
    """Of two ranks that share the experts; on one rank nothing is exchanged."""
    (step,) = [event for event in runs.events("two", "step") if "collectives" in event]
    rows = step["collectives"]["all_to_all.ep"]
    assert rows["count"] == 2 * 4 * 2 * 2  # layers, micro-batches, there and back, both passes
    assert rows["bytes"] > rows["count"] * 1000
    assert 0 <= rows["exposed_ms"] <= step["exposed_ms"]
    waited = sum(each["exposed_ms"] for each in step["collectives"].values())
    assert waited == pytest.approx(step["exposed_ms"], rel=1e-6, abs=1e-3)
    assert 1 <= step["expert_rank_imbalance"] <= 2
    assert 0 < step["expert_compute_ms"] < step["step_ms"]
    lost = (step["expert_rank_imbalance"] - 1) * step["expert_compute_ms"]
    assert step["expert_skew_ms"] == pytest.approx(lost)
    assert "the others waited at least" in build_report(runs.folder / "two")[0].read_text()
    (alone,) = [event for event in runs.events("one", "step") if "collectives" in event]
    assert alone["collectives"] == {}
    assert "expert_skew_ms" not in alone


@pytest.fixture(scope="module")
def published(runs: Runs) -> dict[str, Any]:
    """Begins with a folder of Mixtral's form, made of a run; one rank has done so: `from-one`."""
    folder, exported = runs.checkpoint("one", STEPS), runs.folder / "published"
    export_checkpoint(folder, sound_manifest(folder), exported, torch.float32)
    start = {"model__config": str(exported), "train__steps": 2, "checkpoint__every": 0}
    runs.train("from-one", 1, **ONE | start)
    return start


@pytest.mark.parametrize(
    ("out", "ranks", "settings"),
    [("from-two", 2, TWO), pytest.param("from-four", 4, FOUR, marks=WIDE)],
)
def test_a_published_checkpoint_is_dealt_to_ranks(
    runs: Runs, published: dict[str, Any], out: str, ranks: int, settings: dict[str, Any]
) -> None:
    """Ranks begin as one does that reads the same folder."""
    runs.train(out, ranks, **settings | published)
    assert runs.losses("from-one")[0] < runs.losses("one")[0] - 0.1
    assert numbers(runs, out) == pytest.approx(numbers(runs, "from-one"), rel=1e-5)


@WIDE
def test_stages_of_a_pipeline_have_layers_of_experts(runs: Runs) -> None:
    """All experts of a layer on one rank: nothing of them crosses."""
    stages = {"strands": "2", "parallel__pipeline": 2, "pipeline__schedule": "zb_v"}
    runs.train("stages", 2, **ONE | stages)
    assert numbers(runs, "stages") == pytest.approx(numbers(runs, "one"), rel=1e-5)


BIASED = {
    "model__experts__router": "sigmoid",
    "model__experts__balance": "bias",
    "model__experts__bias_speed": 0.001,
}


@pytest.fixture(scope="module")
def biased(runs: Runs) -> dict[str, torch.Tensor]:
    """The biases of one rank, of which each has moved by the speed in every step, up or down; two
    ranks have run too."""
    runs.train("biased-one", 1, **ONE | BIASED)
    runs.train("biased-two", 2, **TWO | BIASED)
    found = biases(runs, "biased-one")
    assert len(found) == 2
    moved = torch.stack(list(found.values())) / 0.001
    assert torch.allclose(moved, moved.round(), atol=1e-3)
    assert 2 <= moved.abs().max().round() <= STEPS
    return found


@pytest.mark.parametrize(
    "out",
    [
        "biased-two",
        pytest.param("biased-stages", marks=WIDE),
        pytest.param("biased-on", marks=WIDE),
    ],
)
def test_biases_of_routers_move_with_the_load_of_all_ranks(
    runs: Runs, biased: dict[str, torch.Tensor], out: str
) -> None:
    """One rank and two end with the same biases, and so do two stages, and a run that a checkpoint
    interrupted."""
    if out == "biased-stages":
        runs.train(out, 2, **ONE | STAGES | BIASED)
    if out == "biased-on":
        resume = {"checkpoint__resume": runs.checkpoint("biased-two", SAVED)}
        runs.train(out, 2, **TWO | BIASED | resume)
    wanted = runs.losses("biased-one")[SAVED if out == "biased-on" else 0 :]
    assert runs.losses(out) == pytest.approx(wanted, rel=1e-5)
    tensors = biases(runs, out)
    assert tensors.keys() == biased.keys()
    for name, bias in biased.items():
        assert torch.equal(tensors[name], bias)


def child_that_asks(folder: str, settings: dict[str, str], after: str) -> dict[str, str]:
    """A rank of a run whose user asks for another plan once metrics have an event `after`."""
    write, asked = MetricsWriter.write, False

    def written(metrics: MetricsWriter, event: str, **values: Any) -> None:
        nonlocal asked
        write(metrics, event, **values)
        if event == after and not asked:
            (metrics.path.parent / RENEW_PLAN).touch()
            asked = True

    with patch.object(MetricsWriter, "write", written):
        return child(folder, settings)


def test_a_plan_is_made_again_when_the_load_drifts_and_when_asked_for(runs: Runs) -> None:
    """With the bits of a run without plans, and between two steps of all ranks. A run that has no
    measured plan says so, and goes on."""
    steps = {"train__steps": 2 * DRIFT_STEPS + 2, "checkpoint__every": 0, "model__layers": 1}
    measured = {"train__renew_plan_at": 1e-6, "plan__cluster": "", "plan__profile_repeats": 1}
    name = "test_train_experts:child_that_asks"
    runs.train("kept", 2, target=name, more=["step"], **TWO | steps | {"strands": "1"})
    runs.train("renewed", 2, target=name, more=["renewal"], **TWO | steps | measured)
    assert numbers(runs, "renewed") == numbers(runs, "kept")
    renewed, asked = runs.events("renewed", "renewal")
    assert renewed["step"] == asked["step"] == 2 * DRIFT_STEPS
    assert asked["asked"]
    assert len(asked["plan"]) == len(renewed["plan"])
    assert not (runs.folder / "renewed" / RENEW_PLAN).exists()
    loads = [event["expert_imbalance"] for event in runs.events("renewed", "step")]
    first, last = loads[:DRIFT_STEPS], loads[DRIFT_STEPS : 2 * DRIFT_STEPS]
    assert renewed["load_before"] == pytest.approx(sum(first) / DRIFT_STEPS)
    assert renewed["load"] == pytest.approx(sum(last) / DRIFT_STEPS)
    (refused,) = runs.events("kept", "renewal")
    assert refused["step"] == 1
    assert "strands = '1'" in refused["refused"]
    assert build_report(runs.folder / "renewed")[0].exists()


def test_drift_is_that_of_the_mean_of_some_steps() -> None:
    drift = Drift(0.1)
    assert [drift.add(2.0) for _ in range(2 * DRIFT_STEPS)] == [None] * 2 * DRIFT_STEPS
    found = [drift.add(2.5) for _ in range(DRIFT_STEPS)]
    (moved,) = [each for each in found if each is not None]
    assert moved[0] == 2
    assert moved[1] > 2.2
    assert [Drift(0).add(load) for load in range(3 * DRIFT_STEPS)] == [None] * 3 * DRIFT_STEPS


def test_what_does_not_go_together_is_refused_with_its_numbers(runs: Runs) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"parallel__data_shard": 3, "parallel__expert": 3}, "count = 4 experts cannot be dealt"),
        ({"parallel__expert": 2}, "does not fit into the 1 ranks"),
        (
            TWO | {"train__renew_plan_at": 0.3, "plan__cluster": "laptop"},
            "and plan.cluster = 'laptop'",
        ),
        (STAGED | {"train__renew_plan_at": 0.3}, "and parallel.pipeline = 2"),
        (
            {
                "strands": "2",
                "parallel__pipeline": 2,
                "parallel__expert": 2,
                "pipeline__stages": ["data_shard=2", "data_shard=2"],
            },
            "experts are dealt to ranks where all stages are laid out alike",
        ),
    ]
    for number, (settings, said) in enumerate(wrong):
        result = runs.train(f"wrong{number}", 1, **COMMON | settings)[0]
        assert said in result.value["error"], result.value
