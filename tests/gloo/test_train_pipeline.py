"""Proves that `interlace train` deals layers to the stages of a pipeline without changing a bit.

`make test` has tensor parallelism and ZeRO-1 in stages, and each form of a schedule once. Wide are
three stages, other numbers of chunks, eight ranks, bfloat16, recomputing where ranks share weights,
other pairs of layouts between which checkpoints go, and ZeRO-3 and replicas, which
`test_dense_stages.py` and `test_pipeline_models.py` have in stages of four ranks.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_runs import SETTINGS, Runs
from processes import run_ranks

from interlace import run_files
from interlace.cli.run_file import load_run_config
from interlace.errors import PeerError
from interlace.ir import store
from interlace.parallel.local_parts import local
from interlace.report.build import build_report
from interlace.sim.pipeline_step import ComparedStep
from wide import WIDE

pytestmark = pytest.mark.gloo
STEPS, SAVED = 4, 2
COMMON: dict[str, Any] = {
    "parallel__tensor": 1,
    "model__layers": 7,  # of which the middle ones are copied from a trace of five
    "model__tied_head": True,
    "train__steps": STEPS,
    "checkpoint__every": SAVED,
}
GPT: dict[str, Any] = {"model__architecture": "gpt", "model__dropout": 0.1}
BLOCKS = "model.blocks.1,model.blocks.3"
PIPELINE: dict[str, Any] = COMMON | {"parallel__pipeline": 2, "strands": "2"}
FEW = {"model__layers": 3}
"""Enough where stages have several ranks: each of them traces all layers, and chunks cut some."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on one rank: `one`, and `gpt` with dropout; of two stages: `folded`."""
    runs = Runs(tmp_path_factory.mktemp("stages"))
    runs.train("one", 1, **COMMON)
    runs.train("gpt", 1, **COMMON | GPT)
    runs.train("folded", 2, **PIPELINE, pipeline__schedule="folded")
    return runs


def numbers(runs: Runs, out: str) -> list[tuple[Any, ...]]:
    """Losses, norms of all gradients and held-out losses, to the last bit."""
    steps = [(e["step"], e["loss"], e["grad_norm"]) for e in runs.events(out, "step")]
    return steps + [(e["step"], e["loss"]) for e in runs.events(out, "evaluate")]


@pytest.mark.parametrize(
    ("out", "ranks", "like", "settings"),
    [
        ("folded", 2, "one", {}),
        # A layer that is cut in its middle and computed again needs its weights on two stages.
        ("again", 2, "one", {"pipeline__schedule": "zb_v", "train__recompute": "layer"}),
        pytest.param(
            "thirds", 3, "one", {"parallel__pipeline": 3, "pipeline__split_at": BLOCKS}, marks=WIDE
        ),
        pytest.param(
            "options", 2, "one", {"pipeline__schedule": "interleaved(chunks=3)"}, marks=WIDE
        ),
        ("gpt-v", 2, "gpt", {"pipeline__schedule": "dual_pipe_v", **GPT}),
    ],
)
def test_stages_change_no_bit(
    runs: Runs, out: str, ranks: int, like: str, settings: dict[str, Any]
) -> None:
    """A head tied to the embedding on another stage, dropout, layers computed again, chunks that
    begin where the user says: losses, norms of gradients and evaluations of one rank."""
    if settings:
        runs.train(out, ranks, **PIPELINE | settings)
    assert numbers(runs, out) == numbers(runs, like)
    assert len(numbers(runs, out)) == STEPS + 2


@pytest.mark.parametrize(
    ("out", "ranks", "source", "settings"),
    [
        ("fewer", 1, "folded", COMMON),
        pytest.param("more", 3, "one", PIPELINE | {"parallel__pipeline": 3}, marks=WIDE),
        pytest.param("other", 2, "folded", PIPELINE | {"pipeline__schedule": "zb_h1"}, marks=WIDE),
    ],
)
def test_checkpoints_go_on_with_another_number_of_stages(
    runs: Runs, out: str, ranks: int, source: str, settings: dict[str, Any]
) -> None:
    """What one layout saved another takes up, weights and optimizer, to the same bits."""
    settings = settings | {"checkpoint__every": 0}
    runs.train(out, ranks, **settings, checkpoint__resume=runs.checkpoint(source, SAVED))
    (resumed,) = runs.actions(out, "resumed")
    assert resumed["step"] == SAVED
    assert runs.losses(out) == runs.losses("one")[SAVED:]


@pytest.mark.parametrize(
    "axes",
    [
        ("pipeline",),
        pytest.param(("data_shard",), marks=WIDE),
        pytest.param(("pipeline", "data_shard"), marks=WIDE),
    ],
)
def test_weights_that_were_read_from_files(runs: Runs, axes: tuple[str, ...]) -> None:
    """An unmodified model of transformers whose weights safetensors has mapped: memory of what a
    rank has not (of other stages, shared with ZeRO-3, or both) is given back all the same."""
    folder = runs.folder / "published"
    if not folder.exists():
        save_small_llama(folder)
        runs.train("mapped", 1, **COMMON | published(folder))
    settings = COMMON | published(folder) | {"strands": "2"}
    out = f"mapped-{'-'.join(axes)}"
    runs.train(out, 2 ** len(axes), **settings | {f"parallel__{axis}": 2 for axis in axes})
    losses = runs.losses(out)
    if axes == ("pipeline",):
        assert losses == runs.losses("mapped")
    if len(axes) == 2:
        assert losses == pytest.approx(runs.losses("mapped-data_shard"), rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


def published(folder: Path) -> dict[str, Any]:
    """Settings of a model of transformers."""
    return {"model__source": "hugging_face", "model__config": folder}


def save_small_llama(folder: Path, *, tied: bool = True) -> None:
    """Four layers, by default with a tied head."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_stage_without_weights_is_refused(runs: Runs) -> None:
    """On all ranks, with what to set: attention alone, between its projections, has none."""
    inside = "model.blocks.2.attention.core,model.blocks.2.attention.output"
    given = PIPELINE | FEW | {"parallel__pipeline": 3, "pipeline__split_at": inside}
    given |= {"output__directory": "bare"}
    settings = SETTINGS | {key.replace("__", "."): str(value) for key, value in given.items()}
    results = run_ranks(
        "checkpoint_runs:child", 3, args=[str(runs.folder), settings], timeout_s=120, check=False
    )
    said = "".join(str(result.value) + result.stderr for result in results)
    assert "stage 1 of the pipeline has no weights that are trained" in said
    assert "set parallel.pipeline to fewer stages" in said


def test_the_report_shows_all_ranks(runs: Runs, tmp_path: Path) -> None:
    """The last step is drawn with a lane for each rank, and compared with its simulation."""
    folder = runs.folder / "folded"
    step = store.load(folder / run_files.PIPELINE, ComparedStep)
    passes = [sum(len(each.slots) for each in actions) for actions in step.actions]
    assert passes == [16, 16]  # 4 micro-batches through 2 chunks, there and back
    assert all(0 <= ns < step.measured.step_ns for ns in step.measured.bubble_ns)
    last = runs.events("folded", "step")[-1]
    assert last["bubble_fraction"] == pytest.approx(step.measured.bubble_fraction)
    assert last["predicted_ms"] == pytest.approx(step.predicted.step_ns / 1e6)
    page, *pictures = build_report(folder, tmp_path / "report.html")
    assert "All ranks of the pipeline" in page.read_text()
    assert f"report-{run_files.PIPELINE_PICTURE}" in {path.name for path in pictures}


@pytest.mark.parametrize("axis", ["tensor", pytest.param("data_replicate", marks=WIDE)])
def test_stages_of_several_ranks(runs: Runs, axis: str) -> None:
    """Two stages of two ranks each, which share layers or see other data: the losses of two ranks
    without stages; norms are added in another order."""
    of_two = COMMON | FEW | {f"parallel__{axis}": 2}
    runs.train(f"{axis}-2", 2, **of_two)
    assert runs.losses(of_four(runs, axis)) == runs.losses(f"{axis}-2")
    norms = [[e["grad_norm"] for e in runs.events(f"{axis}-{n}", "step")] for n in (2, 4)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


def of_four(runs: Runs, axis: str, out: str = "", **settings: Any) -> str:
    """Two stages of two ranks that share this axis; run once."""
    out = out or f"{axis}-4"
    if not (runs.folder / out).exists():
        layout = {f"parallel__{axis}": 2, "pipeline__schedule": "dual_pipe_v"}
        runs.train(out, 4, **PIPELINE | FEW | layout | settings)
    return out


def test_stages_cut_their_collectives_into_sends(runs: Runs) -> None:
    """Rings under partial matmuls, in two strands: losses, norms and evaluations of whole
    collectives, but for how a kernel of another shape rounds in float32."""
    out = of_four(runs, "tensor", "ring", overlap__decompose="ring", overlap__pieces=2)
    listing = json.loads((runs.folder / out / run_files.DECOMPOSE).read_text())
    assert listing["decomposed"] > 0
    whole = numbers(runs, of_four(runs, "tensor"))
    for ours, theirs in zip(numbers(runs, out), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


ZERO = {"parallel__data_shard": 2, "parallel__zero": 1}
ZERO3 = {"parallel__data_shard": 2, "parallel__zero": 3}
SHARED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero": (4, {}),
    "bfloat16": (4, {"train__dtype": "bfloat16", "pipeline__schedule": "folded"}),
    "tensor": (8, {"parallel__tensor": 2, "pipeline__schedule": "zb_v"}),
    "context": (8, {"parallel__context": 2}),
    "again": (4, {"pipeline__schedule": "zb_v", "train__recompute": "layer"}),
}
"""Runs whose stages have several ranks that see other data: ranks, and settings."""


def shared(runs: Runs, name: str, kind: str, layout: dict[str, Any]) -> str:
    """One of these with its weights shared so; run once."""
    ranks, settings = SHARED[name]
    out = name if name == kind else f"{name}-{kind}"
    if not (runs.folder / out).exists():
        runs.train(out, ranks, **PIPELINE | FEW | settings | layout)
    return out


@pytest.mark.parametrize("name", ["zero", pytest.param("bfloat16", marks=WIDE)])
def test_ranks_of_a_stage_share_its_optimizer(runs: Runs, name: str) -> None:
    """ZeRO-1 in a stage: the losses of whole masters on every rank of it, to the last bit."""
    whole = shared(runs, name, "whole", {"parallel__data_replicate": 2})
    out = shared(runs, name, "zero", ZERO)
    assert runs.losses(out) == runs.losses(whole)
    norms = [[e["grad_norm"] for e in runs.events(n, "step")] for n in (out, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


@WIDE
@pytest.mark.parametrize(("name", "kind", "layout"), [
    ("tensor", "gathered", ZERO3),
    ("context", "zero", ZERO),
])  # fmt: skip
def test_stages_whose_ranks_share_a_layer_too(
    runs: Runs, name: str, kind: str, layout: dict[str, Any]
) -> None:
    """Eight ranks that share layers or sequences, see other data and share weights or optimizers:
    the losses of four without stages that have whole weights, but for the order in which the mean
    over ranks is added up."""
    ranks, settings = SHARED[name]
    alone = {key: value for key, value in settings.items() if not key.startswith("pipeline__")}
    of_four = COMMON | FEW | alone | {"parallel__data_replicate": 2}
    runs.train(f"{name}-alone", ranks // 2, **of_four)
    out = shared(runs, name, kind, layout)
    assert runs.losses(out) == pytest.approx(runs.losses(f"{name}-alone"), rel=1e-6)
    norms = [[e["grad_norm"] for e in runs.events(n, "step")] for n in (out, f"{name}-alone")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@WIDE
@pytest.mark.parametrize("name", ["zero", "bfloat16", "again"])
def test_stages_gather_their_weights(runs: Runs, name: str) -> None:
    """ZeRO-3 in a stage, with a head tied to the embedding of another one: losses and norms of
    ZeRO-1, to the last bit."""
    whole = shared(runs, name, "zero", ZERO)
    out = shared(runs, name, "gathered", ZERO3)
    assert numbers(runs, out) == numbers(runs, whole)


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("zero", {"parallel__data_replicate": 2}),
        pytest.param("whole", ZERO3, marks=WIDE),
        pytest.param("gathered", ZERO, marks=WIDE),
    ],
)
def test_checkpoints_of_a_shared_optimizer(runs: Runs, source: str, layout: dict[str, Any]) -> None:
    """What ranks saved in parts others take up whole, or in other parts."""
    layouts = {"zero": ZERO, "whole": {"parallel__data_replicate": 2}, "gathered": ZERO3}
    source = shared(runs, "zero", source, layouts[source])
    settings = PIPELINE | FEW | layout | {"checkpoint__every": 0}
    runs.train(f"{source}-on", 4, **settings, checkpoint__resume=runs.checkpoint(source, SAVED))
    assert runs.losses(f"{source}-on") == runs.losses(source)[SAVED:]


def tampered(folder: str, settings: dict[str, str]) -> list[Any]:
    """A child: one weight of the last rank changes after the first step."""
    from interlace.train.loop import Trainer
    from interlace.train.worker import main

    os.chdir(folder)
    step = Trainer._step

    def wrong(self: Trainer, done: int) -> None:
        step(self, done)
        if done == 1 and os.environ["RANK"] == "3":
            master = next(iter(self.session.weights.masters.values()))
            local(master).data.view(-1)[0] += 1

    with patch.object(Trainer, "_step", wrong):
        try:
            main(load_run_config("run.toml", settings))
        except PeerError as error:
            return [error.message]
    return []


def test_replicas_of_a_stage_are_compared(runs: Runs) -> None:
    """A weight that has come to differ between the replicas of the second stage ends the run on all
    ranks before anything is saved."""
    given = PIPELINE | FEW | {"parallel__data_replicate": 2, "output__directory": "odd"}
    settings = SETTINGS | {k.replace("__", "."): str(value) for k, value in given.items()}
    results = run_ranks(
        "test_train_pipeline:tampered", 4, args=[str(runs.folder), settings], timeout_s=120
    )
    said = [result.value[0] for result in results]
    assert all("weight '" in text and "disagree" in text for text in said), said
    assert not list((runs.folder / "odd/checkpoints").glob("step-*"))
