"""What the search of layouts proposes is the best there is, fits, and is a run file that runs."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.config import DataConfig, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from interlace.degrees import resolve_layout
from interlace.errors import InputError
from interlace.hardware.cluster_size import load_sized_cluster
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.report.strategy_tables import strategy_data, strategy_summary
from interlace.rules import check
from interlace.schedules.finder import find, names
from interlace.schedules.schedule_text import write_schedule
from interlace.sim.pipeline_costs import ChunkCosts, PipelineCosts
from interlace.sim.pipeline_step import simulate_pipeline
from interlace.strategy.contributions import contributions
from interlace.strategy.expected_error import ERRORS
from interlace.strategy.job_layout import JobLayout, layout_of, with_layout
from interlace.strategy.layout_order import LayoutOrder
from interlace.strategy.layout_search import SPARE, search_layouts
from interlace.strategy.layout_space import LayoutSpace
from interlace.strategy.lower_bounds import Bounds
from interlace.strategy.schedule_facts import facts_of, interleaves
from interlace.strategy.search_cache import search_key
from interlace.strategy.simulated_job import simulate_job, step_of
from interlace.strategy.steady_step import steady_step

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "cpu" / "simulator.json"
LLAMA = RunConfig(
    model=ModelConfig(
        layers=16, width=4096, heads=32, kv_heads=8, ffn_width=14336, vocab_size=32000
    ),
    data=DataConfig(sequence_length=4096),
    train=TrainConfig(dtype="bfloat16"),
)


def space_of(config=LLAMA, cluster="a100-80x16", global_batch=64):
    on, devices = load_sized_cluster(cluster)
    return LayoutSpace(config=config, cluster=on, devices=devices, global_batch=global_batch)


def with_kept(config=LLAMA, **parallel):
    return replace(config, parallel=replace(config.parallel, **parallel))


@pytest.mark.parametrize(("tensor", "batch"), [(2, 16), (2, 4), (4, 16)])
def test_the_chosen_is_as_good_as_the_best_of_all(tensor, batch):
    """Every layout of a small space that fits, simulated whole; of those of one strand and of two,
    the best is found too, also where none of two is among the ten best (4 sequences)."""
    recompute = replace(LLAMA.train, recompute="attention")
    space = space_of(replace(with_kept(zero=1, tensor=tensor), train=recompute), global_batch=batch)
    found = search_layouts(space)
    assert found.exhaustive
    assert any(interleaves(each.layout) for each in found.best) == (batch == 16)
    bounds, room = Bounds(space.config, space.cluster), (1 - SPARE) * 80e9
    steps: dict[bool, list[float]] = {True: [], False: []}
    for layout in space.layouts():
        parts = bounds.parts(layout)
        try:
            if bounds.least_bytes(layout, room) > room:
                continue
            one = simulate_job(space.config, space.cluster, layout, parts)
        except InputError:
            continue
        steps[interleaves(layout)].append(one.seconds)
    assert len(steps[True]) + len(steps[False]) > found.simulated
    assert found.best[0].seconds <= 1.02 * min(min(each) for each in steps.values())
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    assert found.one_strand is not None
    assert found.one_strand.seconds <= 1.02 * min(steps[False])
    assert found.two_strands is not None
    assert found.two_strands.seconds <= 1.02 * min(steps[True])
    assert found.gain == found.one_strand.seconds / found.two_strands.seconds - 1


def test_bounds_are_below_simulations():
    """Of times, and about those of memory."""
    space = space_of(cluster="h100x32", global_batch=128)
    bounds = Bounds(space.config, space.cluster)
    layouts = random.Random(3).sample(list(space.layouts()), 60)
    checked = 0
    for layout in layouts:
        try:
            found = simulate_job(space.config, space.cluster, layout, bounds.parts(layout))
        except InputError:
            continue
        checked += 1
        assert bounds.least_ns(layout) <= 1.02 * found.step.step_ns, layout
        assert bounds.least_bytes(layout, float("inf")) <= 1.05 * found.peak.total, layout
        short = step_of(space.config, layout, bounds.parts(layout))
        assert short == (found.step.step_ns, found.peak), layout
        if layout.micro_batches > 8:
            steady = steady_step(space.config, layout, bounds.parts(layout))
            assert steady.step_ns == pytest.approx(found.step.step_ns, rel=0.03), layout
    assert checked > 40


@pytest.mark.parametrize("cluster", ["h100x32", "a40x32"])
def test_groups_of_layouts_leave_their_order_as_it_is(cluster):
    """As if the bounds of all were found before they are sorted."""
    space = space_of(with_kept(tensor=4), cluster, global_batch=96)
    bounds = Bounds(space.config, space.cluster)
    room = (1 - SPARE) * space.cluster.memory_gib * 2**30
    wanted = []
    for number, layout in enumerate(space.layouts()):
        try:
            if bounds.least_bytes(layout, room) <= room:
                wanted.append((bounds.least_ns(layout), number, layout))
        except InputError:
            continue
        assert bounds.of_group_ns(layout) <= bounds.least_ns(layout) * (1 + 1e-9), layout
    order = LayoutOrder(space.layouts(), bounds, room)
    assert next(iter(order))[1] == min(wanted)[2]
    assert len(order.able) < order.count / 2
    found = [*order]
    assert [layout for _, layout in found] == [layout for *_, layout in sorted(wanted)]
    assert [*order] == found
    assert order.count == number + 1
    assert order.too_large == len(order.able) - len(found)


OWN = """
from interlace.schedules.eager_folded import eager_folded

def order(ranks, micro_batches, chunks=2):
    return eager_folded(ranks, micro_batches, chunks)
"""


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("DualPipeV", "dual_pipe_v"),
        ("1F1B", "one_f_one_b"),
        ("eager_folded( depth = 2 )", "eager_folded(depth=2)"),
        ("schedule_of_a_user:order", "schedule_of_a_user:order"),
        ("folded.txt", "folded.txt"),
    ],
)
def test_bounds_hold_by_any_name(schedule, name, tmp_path, monkeypatch):
    """Whatever words a run file has for a schedule: a name elsewhere, an own function that runs
    strands side by side, a list. Names are those of `find`."""
    (tmp_path / "schedule_of_a_user.py").write_text(OWN)
    (tmp_path / "folded.txt").write_text(write_schedule(find("folded").of_ranks(2, 40)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = replace(with_kept(pipeline=2, zero=1), pipeline=PipelineConfig(schedule=schedule))
    config = replace(config, train=replace(config.train, recompute="none", micro_batch_size=1))
    assert layout_of(replace(config, parallel=ParallelConfig(pipeline=2))).schedule == name
    space = space_of(config, "h100x32", 40)
    bounds, checked = Bounds(space.config, space.cluster), 0
    staged = [each for each in space.layouts() if each.pipeline > 1 and each.context == 1]
    for layout in random.Random(2).sample(staged, min(20, len(staged))):
        found = simulate_job(space.config, space.cluster, layout, bounds.parts(layout))
        assert bounds.least_ns(layout) <= 1.02 * found.step.step_ns, layout
        assert bounds.least_bytes(layout, float("inf")) <= 1.05 * found.peak.total, layout
        if schedule != "1F1B":
            assert layout.schedule == name
            assert interleaves(layout)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("schedule", "stages"), [("eager_folded", 2), ("eager_folded", 4), ("stp", 4)]
)
def test_long_steps_follow_from_short_ones(schedule, stages):
    """Also where a schedule runs far ahead, and is in its stride only when that is used up: layers
    computed again on few stages."""
    space = space_of(cluster="h100x32", global_batch=96)
    layout = JobLayout(
        data_shard=1, tensor=8, pipeline=stages, schedule=schedule, micro_batches=96,
        recompute="layer",
    )  # fmt: skip
    parts = Bounds(space.config, space.cluster).parts(layout)
    found = simulate_job(space.config, space.cluster, layout, parts)
    steady = steady_step(space.config, layout, parts)
    assert steady.step_ns == pytest.approx(found.step.step_ns, rel=0.001)
    assert steady.peak.total == pytest.approx(found.peak.total, rel=0.001)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("name", [name for name in names() if find(name).declared.settles])
def test_few_micro_batches_show_what_ranks_keep_of_many(name, ranks):
    """Of `eager_folded`, which runs ahead for longest, nearly all of it."""
    count = 8 * ranks
    layout = JobLayout(pipeline=ranks, schedule=name, micro_batches=count)
    try:
        facts = facts_of(layout)
    except InputError:
        assert name == "two_strand"
        assert ranks > 1
        return
    chunk = ChunkCosts(forward_ns=1, input_ns=1, weight_ns=1)
    costs = PipelineCosts(chunks=[chunk] * (ranks * find(name).chunks))
    kept = simulate_pipeline(find(name).of_ranks(ranks, count), costs).peak_chunks
    assert facts.micro_batches < count
    assert facts.kept == kept or (name == "eager_folded" and max(facts.kept) == max(kept))


def test_what_a_stage_keeps_of_gpipe_grows_with_the_step():
    """So no long step of it is drawn out of two short ones."""
    schedule = PipelineConfig(schedule="GPipe")
    space = space_of(replace(with_kept(pipeline=2, zero=1), pipeline=schedule), "h100x32", 64)
    layout = JobLayout(
        data_shard=1, tensor=8, pipeline=2, zero=1, schedule="gpipe", micro_batches=64
    )
    parts = Bounds(space.config, space.cluster).parts(layout)
    found = simulate_job(space.config, space.cluster, layout, parts)
    steady = steady_step(space.config, layout, parts)
    assert (steady.step_ns, steady.peak) == (found.step.step_ns, found.peak)


def random_space(draw):
    heads = draw.choice([2, 4, 6, 8])
    kv_heads = draw.choice([k for k in (1, 2, heads) if heads % k == 0])
    architecture = draw.choice(["llama", "gpt", "moe"])
    experts = ExpertsConfig()
    if architecture == "moe":
        count = draw.choice([2, 4, 6, 8])
        experts = ExpertsConfig(
            count=count, chosen=draw.choice([1, 2]), ffn_width=draw.choice([0, 16]),
            shared_width=draw.choice([0, 0, 32]),
        )  # fmt: skip
    model = ModelConfig(
        architecture=architecture,
        experts=experts,
        layers=draw.choice([1, 2, 3, 4, 7, 8]),
        width=heads * draw.choice([8, 16]),
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=draw.choice([32, 48, 96]),
        vocab_size=draw.choice([256, 300, 512]),
    )
    config = RunConfig(
        model=model,
        data=DataConfig(sequence_length=draw.choice([16, 32, 48, 16384, 32768])),
        train=TrainConfig(dtype="bfloat16"),
    )
    devices = draw.choice([1, 2, 4, 8, 16])
    return space_of(config, f"a100-80x{devices}", draw.choice([4, 12, 16, 24]))


def test_times_that_layouts_share_are_those_of_each():
    """Bounds keep times of passes for layouts alike but for their shards, whose exchanges once a
    step are their own: the same step as without what is shared, of 8 shards and of 512."""
    space = space_of(cluster="a100-80x4096", global_batch=8192)
    bounds, steps = Bounds(space.config, space.cluster), []
    for shards in (8, 64, 512):
        layout = JobLayout(
            data_replicate=512 // shards,
            data_shard=shards,
            tensor=4,
            pipeline=2,
            zero=1,
            schedule="one_f_one_b",
            micro_batches=16,
        )
        alone = simulate_job(space.config, space.cluster, layout)
        shared = simulate_job(space.config, space.cluster, layout, bounds.parts(layout))
        assert shared.step.step_ns == alone.step.step_ns
        assert shared.exposed_s == alone.exposed_s
        steps.append(shared.exposed_s["dp_shard"])
    assert steps == sorted(set(steps))


def test_what_is_proposed_keeps_the_rules():
    """200 tiny models, with experts and long sequences among them: layouts of their spaces are run
    files that `rules.check` accepts, on all devices, with the whole batch, and that read back."""
    draw, proposed, dealt, shared = random.Random(7), 0, 0, 0
    for _ in range(200):
        space = random_space(draw)
        layouts = list(space.layouts())
        for layout in draw.sample(layouts, min(5, len(layouts))):
            config = with_layout(space.config, layout)
            check(config)
            resolve_layout(config, space.devices)
            assert config.parallel.ranks == space.devices
            assert layout.replicas * layout.micro_batch * layout.micro_batches == space.global_batch
            assert layout_of(config) == layout
            proposed += 1
            dealt += layout.expert > 1
            shared += layout.context > 1
    assert proposed > 600
    assert min(dealt, shared) > 50


def test_runs_of_searches_keep_the_rules():
    """The same of what a search chooses, with where chunks begin."""
    draw = random.Random(11)
    for _ in range(6):
        space = random_space(draw)
        try:
            run = search_layouts(space).run()
        except InputError as error:
            assert "cannot be dealt" in error.message  # noqa: PT017  names what is wrong
            continue
        check(resolve_layout(run, space.devices))
        assert len(run.pipeline.split_at) + 1 == max(1, len(run.pipeline.split_at) + 1)


def test_what_is_given_is_kept():
    config = replace(
        with_kept(tensor=4, pipeline=2), train=TrainConfig(dtype="bfloat16", recompute="layer")
    )
    space = space_of(config)
    assert space.kept == {"tensor": 4, "pipeline": 2, "recompute": "layer"}
    found = search_layouts(space)
    assert {(e.layout.tensor, e.layout.pipeline, e.layout.recompute) for e in found.best} == {
        (4, 2, "layer")
    }
    alone = search_layouts(space_of(replace(LLAMA, strands="1")))
    assert alone.two_strands is None
    assert "two strands: not tried, as the run file has one" in strategy_summary(alone, ())


def test_it_says_do_not_where_two_strands_gain_nothing():
    """Replicas on one host that exchange once a step have nothing to hide in a pass."""
    config = with_kept(data_replicate=8, zero=1)
    found = search_layouts(space_of(config, "a100-80x8", 64))
    assert found.two_strands is not None
    assert interleaves(found.two_strands.layout)
    assert found.gain < 0.01
    assert found.chosen.layout.schedule == "one_strand"
    assert found.run().strands == "1"
    assert "two strands: do not" in strategy_summary(found, ())


def test_summary_and_data():
    """Each technique of the chosen layout is turned off, and none makes the step shorter by more
    than noise unless it saves memory."""
    found = search_layouts(space_of())
    parts = contributions(found.chosen)
    assert parts
    text = strategy_summary(found, parts)
    assert "expected error: 7 % of the step (vTrain, A100-SXM" in text
    for each in parts:
        assert each.technique in text
        assert each.why_not or not each.fits or each.seconds > 0.97 * found.chosen.seconds
    data = json.loads(json.dumps(strategy_data(found, parts)))
    assert data["chosen"]["step_s"] == found.chosen.seconds
    assert len(data["best"]) == len(found.best) <= 10


@pytest.mark.parametrize(
    ("config", "cluster", "batch", "named"),
    [
        (LLAMA, "h100x256", 7, "cannot be dealt to replicas on 256 devices"),
        (LLAMA, "h100x16", 0, "--global-batch 0"),
        (with_kept(tensor=3), "h100x16", 16, "tensor = 3"),
        (
            replace(LLAMA, model=replace(LLAMA.model, layers=2000)),
            "v100x8",
            8,
            "does not fit on 8 x v100: the least found is",
        ),
        (replace(LLAMA, parallel=ParallelConfig(context=3)), "h100x8", 8, "context = 3"),
    ],
)
def test_what_is_wrong_is_named(config, cluster, batch, named):
    with pytest.raises(InputError, match=named):
        search_layouts(space_of(config, cluster, batch))


def test_the_least_memory_is_that_of_all_layouts():
    """Of Llama 405B on 64 devices. With one chunk's values 64 stages take least, and that is above
    the memory of a device already; with all values 8 stages of 8 tensor ranks do."""
    model = ModelConfig(
        layers=126, width=16384, heads=128, kv_heads=8, ffn_width=53248, vocab_size=128256
    )
    config = replace(LLAMA, model=model, data=DataConfig(sequence_length=8192))
    space = space_of(config, "h100x64", 64)
    with pytest.raises(InputError, match="does not fit") as found:
        search_layouts(space)
    said = float(re.search(r"least found is ([\d.]+) GiB", found.value.message)[1])
    bounds = Bounds(space.config, space.cluster)
    peaks = [
        simulate_job(space.config, space.cluster, layout, bounds.parts(layout)).peak.total / 2**30
        for layout in space.layouts()
        if (layout.tensor, layout.pipeline, layout.recompute) == (8, 8, "layer")
        and (layout.micro_batch, layout.schedule) == (1, "one_f_one_b")
    ]
    assert peaks
    assert said <= 1.01 * min(peaks)


def test_the_expected_error_is_that_of_the_bench():
    """Held-out rows with nothing fitted, in the record of `interlace bench simulator`."""
    rows = json.loads(RESULTS.read_text())["rows"]
    held_out = {r["case"]: r["baseline"] for r in rows if r["metric"] == "held_out_error"}
    for share, source in ERRORS.values():
        assert held_out[source] == pytest.approx(share, abs=0.001)


MIXTURE = replace(
    LLAMA,
    model=replace(
        LLAMA.model, architecture="moe", ffn_width=4096, experts=ExpertsConfig(count=8, chosen=2)
    ),
)


def test_experts_are_dealt_and_bounds_hold():
    """Layouts that deal experts are among the best, and bounds are below simulations."""
    space = space_of(with_kept(MIXTURE, zero=1, tensor=1), "a100-80x16", 16)
    found = search_layouts(space)
    dealt = next(each for each in found.best if each.layout.expert > 1)
    parts = contributions(dealt)
    assert any(each.technique.startswith("expert ") for each in parts)
    assert "for a token), experts balanced" in strategy_summary(found, parts)
    bounds = Bounds(space.config, space.cluster)
    sample = [each for each in space.layouts() if each.expert > 1]
    checked = 0
    for layout in random.Random(5).sample(sample, 25):
        try:
            one = simulate_job(space.config, space.cluster, layout, bounds.parts(layout))
        except InputError:
            continue
        checked += 1
        assert bounds.least_ns(layout) <= 1.02 * one.step.step_ns, layout
        assert bounds.least_bytes(layout, float("inf")) <= 1.05 * one.peak.total, layout
    assert checked > 15
    assert found.exhaustive


def test_long_sequences_are_shared():
    """Where one rank cannot hold one: 65,536 tokens of it, by either method."""
    config = replace(with_kept(tensor=1, zero=3), data=DataConfig(sequence_length=65536))
    space = space_of(config, "a100-80x16", 16)
    methods = {(e.context, e.context_method) for e in space.layouts()}
    assert {(1, "ulysses"), (8, "ulysses"), (8, "ring")} <= methods
    found = search_layouts(space)
    assert found.chosen.layout.context > 1
    assert found.run().parallel.context == found.chosen.layout.context


def test_a_search_is_kept_by_the_load_of_experts():
    """Uneven experts are another search."""
    space = space_of(with_kept(MIXTURE, zero=1, tensor=1), "a100-80x16", 16)
    assert search_key(space) == search_key(replace(space))
    assert search_key(space) != search_key(replace(space, expert_load=1.5))
