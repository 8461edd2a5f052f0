"""Simulated steps follow from the step model where that knows them, and from nothing else."""

from dataclasses import replace

import pytest

from interlace.cli.run_file import load_run_config
from interlace.config import (
    DataConfig,
    OverlapConfig,
    ParallelConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.cluster_size import load_sized_cluster
from interlace.hardware.step_model import estimate_step
from interlace.ir.actions import Direction
from interlace.ir.graph import COMPUTE_LANE, Kind
from interlace.ir.timeline import overlaps
from interlace.model_config import ModelConfig
from interlace.strategy.chunk_cuts import even_cuts, given_cuts, split_names
from interlace.strategy.job_layout import layout_of, step_job, with_layout
from interlace.strategy.pass_times import PassTimes
from interlace.strategy.rank_memory import kept_bytes, late_bytes, rank_memory, rank_parameters
from interlace.strategy.simulated_job import JobParts, parts_of, simulate_job

H100 = load_cluster("h100")
A100 = load_cluster("a100-80")
MIB = 2**20
LLAMA = RunConfig(
    model=ModelConfig(
        layers=32, width=4096, heads=32, kv_heads=8, ffn_width=14336, vocab_size=128256
    ),
    parallel=ParallelConfig(tensor=8),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(micro_batches=8, micro_batch_size=1, dtype="bfloat16"),
)


def with_parallel(config=LLAMA, schedule="", **degrees):
    parallel = replace(config.parallel, **degrees)
    pipeline = PipelineConfig(schedule=schedule) if schedule else PipelineConfig()
    return replace(config, parallel=parallel, pipeline=pipeline)


def simulated(config, cluster=H100):
    return simulate_job(config, cluster, layout_of(config))


@pytest.mark.parametrize("pipeline", [1, 4])
def test_one_strand_is_the_step_model(pipeline):
    """But for collectives that weight gradients hide, and layers that do not divide by stages."""
    config = with_parallel(schedule="1F1B" if pipeline > 1 else "", pipeline=pipeline)
    config = config if pipeline > 1 else replace(config, strands="1")
    found = simulated(config)
    job = step_job(config, layout_of(config))
    assert estimate_step(H100, job).seconds == pytest.approx(found.seconds, rel=0.1)
    assert found.hfu == found.mfu
    assert simulated(config).step == found.step, "deterministic"


def test_two_strands_hide_what_one_exposes():
    two = simulated(LLAMA, A100)
    one = simulated(replace(LLAMA, strands="1"), A100)
    assert two.seconds < one.seconds
    assert one.exposed_s["tp"] > 0.5 * one.communication_s["tp"]
    assert two.exposed_s["tp"] < 0.5 * one.exposed_s["tp"]
    assert two.communication_s["tp"] == pytest.approx(one.communication_s["tp"], rel=0.01)


SCHEDULES = (
    "gpipe one_f_one_b eager_one_f_one_b interleaved interleaved(chunks=4) zb_h1 zb_h2 zb_v "
    "folded eager_folded dual_pipe_v stp"
)


@pytest.mark.parametrize("schedule", SCHEDULES.split())
def test_every_schedule_of_a_pipeline(schedule):
    """Each rank does one thing at a time, all layers are somewhere, and no step beats its work."""
    config = with_parallel(schedule=schedule, pipeline=4, tensor=2)
    found = simulated(config)
    for timeline in found.step.timelines:
        assert not overlaps(tuple(s for s in timeline.spans if s.lane == COMPUTE_LANE))
    alone = simulated(replace(with_parallel(tensor=2), strands="1"))
    assert found.seconds > alone.seconds / 4 * 0.85
    assert 0 <= found.bubble < 0.75
    assert all(each.total > 0 for each in found.memory)
    assert found.step.timelines[0].label == "predicted"
    assert {"optimizer"} <= {span.kind for span in found.step.timelines[0].spans}


def test_what_replicas_exchange_once_a_step():
    """Under the last backward of one stage, behind the actions of a pipeline."""
    apart = simulated(with_parallel(data_replicate=4), A100)
    alone = simulated(LLAMA, A100)
    assert alone.seconds < apart.seconds < alone.seconds + apart.communication_s["dp_replicate"]
    staged = with_parallel(pipeline=4, schedule="1F1B")
    more = simulated(replace(staged, parallel=replace(staged.parallel, data_replicate=4)), A100)
    assert more.exposed_s["dp_replicate"] == more.communication_s["dp_replicate"] > 0


@pytest.mark.parametrize("schedule", ["interleaved(chunks=4)", "zb_v", "dual_pipe_v"])
def test_chunks_sum_their_gradients_when_they_are_over(schedule):
    """Each behind its last backward, one after the other, and the last one in the open; whole,
    where another program reduces them to shards behind all actions."""
    degrees = {"tensor": 2, "data_shard": 4, "zero": 1}
    config = with_parallel(pipeline=4, schedule=schedule, **degrees)
    layout, parts = layout_of(config), parts_of(config, A100, layout_of(config))
    found = simulate_job(config, A100, layout, parts)
    late = simulate_job(config, A100, layout, replace(parts, sums_late=True))
    hidden = 0
    for rank, (timeline, end) in enumerate(zip(found.step.timelines, found.ends, strict=True)):
        actions = zip(
            found.actions[rank], [s for s in timeline.spans if s.kind == "action"], strict=True
        )
        over: dict[int | None, int] = {}
        for action, span in actions:
            for slot in action.slots:
                if slot.strand.direction == Direction.BACKWARD:
                    over[slot.strand.chunk] = span.end_ns
        sums = [s for s in timeline.spans if s.lane == "dp_shard" and s.kind == Kind.ALL_REDUCE]
        assert len(sums) == len(over)
        assert all(s.start_ns >= at for s, at in zip(sums, sorted(over.values()), strict=True))
        assert not overlaps(tuple(sums))
        assert sum(s.duration_ns for s in sums) == pytest.approx(1e9 * end.reduce_s, abs=9)
        left = sums[-1].end_ns - max(over.values())
        assert left == pytest.approx(1e9 * end.reduce_exposed_s, abs=9)
        assert end.least_reduce_exposed_s <= end.reduce_exposed_s
        assert end.reduce_s == pytest.approx(2 * late.ends[rank].reduce_s, rel=0.1)
        assert late.ends[rank].reduce_exposed_s == late.ends[rank].reduce_s
        hidden += sums[0].end_ns < max(over.values())
    assert hidden


def test_what_another_program_may_do():
    """Sums in 16 bits and in the open, gathers again beside a matmul, messages that block."""
    config = with_parallel(pipeline=4, tensor=2, data_replicate=4, schedule="1F1B")
    layout = layout_of(config)
    parts = parts_of(config, A100, layout)
    ours = simulate_job(config, A100, layout, parts)
    job = replace(parts.job, gradient_bytes=2)
    operators = replace(parts.times.operators, job=job, gathers_again=True)
    theirs = JobParts(job, parts.links, PassTimes(operators), waits_for_messages=True)
    found = simulate_job(config, A100, layout, theirs)
    ratio = found.communication_s["dp_replicate"] / ours.communication_s["dp_replicate"]
    assert ratio == pytest.approx(0.5, rel=0.1)
    assert found.communication_s["tp"] == pytest.approx(1.25 * ours.communication_s["tp"], rel=0.01)
    assert ours.exposed_s["tp"] <= found.exposed_s["tp"] < 1.1 * ours.exposed_s["tp"]
    waits = replace(parts, waits_for_messages=True)
    assert simulate_job(config, A100, layout, waits).seconds > ours.seconds

    alone = with_parallel(data_replicate=4, tensor=2)
    layout = layout_of(alone)
    parts = parts_of(alone, A100, layout)
    assert parts.job.overlap_gradients
    job = replace(parts.job, overlap_gradients=False)
    operators = replace(parts.times.operators, job=job)
    found = simulate_job(alone, A100, layout, JobParts(job, parts.links, PassTimes(operators)))
    assert found.exposed_s["dp_replicate"] == pytest.approx(found.communication_s["dp_replicate"])


def test_weights_that_are_gathered_for_each_pass():
    """ZeRO-3 takes less memory and a longer step than ZeRO-1; summing after each micro-batch less
    memory still."""

    def of(**more):
        return simulated(replace(with_parallel(data_shard=8, **more), strands="1"), A100)

    three, one, each = of(), of(zero=1), of(reduce="micro_batch")
    assert three.seconds > one.seconds
    assert each.peak.total < three.peak.total < one.peak.total
    assert each.communication_s["dp_shard"] > three.communication_s["dp_shard"]


def traced_layout(case):
    architecture, tensor, recompute, kv_heads, ffn = case
    model = ModelConfig(
        architecture=architecture, layers=2, width=1024, heads=8, kv_heads=kv_heads, ffn_width=ffn,
        vocab_size=256,
    )  # fmt: skip
    config = replace(
        LLAMA, model=model, parallel=ParallelConfig(tensor=tensor),
        data=DataConfig(sequence_length=1024),
        train=replace(LLAMA.train, recompute=recompute),
    )  # fmt: skip
    layout = layout_of(config)
    return layout, step_job(config, layout)


TRACED = {  # layers of width 1024, ffn 4096, 1024 tokens: MiB for each, by `interlace plan`
    ("llama", 1, "none", 8, 4096): 60.0,
    ("llama", 1, "none", 8, 2048): 44.0,
    ("llama", 1, "none", 2, 4096): 57.0,
    ("llama", 1, "attention", 8, 4096): 58.0,
    ("llama", 1, "attention", 2, 4096): 55.0,
    ("llama", 1, "layer", 8, 4096): 2.0,
    ("llama", 4, "none", 8, 4096): 18.0,
    ("llama", 4, "none", 4, 4096): 17.5,
    ("llama", 4, "attention", 8, 4096): 17.5,
    ("llama", 4, "layer", 8, 4096): 1.0,
    ("gpt", 1, "none", 8, 4096): 32.0,
    ("gpt", 4, "none", 8, 4096): 12.05,
}


@pytest.mark.parametrize("case", TRACED)
def test_layers_keep_what_traced_graphs_keep(case):
    layout, job = traced_layout(case)
    assert kept_bytes(job, layout) / MIB == pytest.approx(TRACED[case], rel=0.04)


TRACED_LATE = {  # what gradients of weights need, where `runtime.chunks` cut backwards in two
    ("llama", 1, "none", 8, 4096): 61.0,
    ("llama", 4, "none", 8, 4096): 21.38,
    ("llama", 1, "none", 8, 2048): 49.0,
    ("llama", 1, "none", 2, 4096): 56.5,
    ("llama", 1, "layer", 8, 4096): 69.03,
    ("llama", 4, "layer", 8, 4096): 23.39,
    ("llama", 1, "attention", 8, 4096): 61.03,
    ("gpt", 1, "none", 8, 4096): 36.51,
    ("gpt", 4, "none", 8, 4096): 16.14,
}


@pytest.mark.parametrize("case", TRACED_LATE)
def test_cut_backwards_keep_what_traced_graphs_keep(case):
    layout, job = traced_layout(case)
    assert late_bytes(job, layout) / MIB == pytest.approx(TRACED_LATE[case], rel=0.04)


PLANNED = {  # `interlace plan llama-70b-pipeline --cluster h100`: GiB of the rank that needs most
    "one_f_one_b": 94.2,
    "eager_one_f_one_b": 133.7,
    "interleaved": 114.0,
    "zb_h1": 111.1,
    "zb_v": 102.9,
    "folded": 101.6,
    "eager_folded": 141.6,
    "dual_pipe_v": 101.6,
    "stp": 155.5,
}


@pytest.mark.parametrize("schedule", PLANNED)
def test_a_pipeline_takes_the_memory_that_its_traced_plan_says(schedule):
    """80 layers on 32 ranks, within 2 %."""
    config = load_run_config("llama-70b-pipeline", {"pipeline.schedule": schedule})
    found = simulated(config)
    assert found.peak.total / 2**30 == pytest.approx(PLANNED[schedule], rel=0.02)


def test_what_a_rank_holds_all_the_time():
    """As `interlace plan` says of a traced model: 65.0 MiB of weights, and so on."""
    model = ModelConfig(layers=2, width=1024, heads=8, kv_heads=8, ffn_width=4096, vocab_size=256)
    config = replace(LLAMA, model=model, parallel=ParallelConfig())
    layout = layout_of(config)
    job = step_job(config, layout)
    parameters = rank_parameters(job, layout, 2, first=True, last=True)
    found = rank_memory(job, layout, parameters, 0.0, last=True)
    held = [found.weights, found.masters, found.gradients, found.optimizer]
    assert [each / MIB for each in held] == pytest.approx([65, 130, 130, 260], rel=1e-3)


def test_chunks_begin_where_the_head_is_made_up_for():
    assert even_cuts(8, 4, 0.0) == (0, 2, 4, 6)
    assert even_cuts(8, 2, 2.0) == (0, 5)
    assert split_names(even_cuts(8, 2, 2.0)) == ("model.blocks.5",)
    assert given_cuts(("model.blocks.1", "model.blocks.7"), 8, 3) == (0, 1, 7)
    with pytest.raises(InputError, match="do not fill"):
        even_cuts(3, 4, 0.0)
    with pytest.raises(InputError, match="in order"):
        given_cuts(("model.blocks.7", "model.blocks.1"), 8, 3)


def test_a_layout_goes_to_a_run_and_back():
    config = with_parallel(pipeline=4, data_shard=2, schedule="zb_v", zero=1)
    layout = layout_of(config)
    assert layout_of(with_layout(LLAMA, layout)) == layout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"overlap": OverlapConfig(decompose="ring", passes="ends")}, "overlap.passes = 'ends'"),
        ({"strands": "eager"}, "strands = 'eager'"),
        ({"train": replace(LLAMA.train, dtype="float32")}, "train.dtype"),
        ({"model": replace(LLAMA.model, architecture="moe")}, "experts"),
        ({"parallel": ParallelConfig(data_shard=-1)}, "data_shard = -1"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, named):
    with pytest.raises(InputError, match=named):
        layout_of(replace(LLAMA, **change))


def test_clusters_with_the_number_of_their_devices():
    cluster, devices = load_sized_cluster("h100x64")
    assert (cluster.hosts, devices) == (8, 64)
    assert load_sized_cluster("h100") == (H100, 0)
    assert load_sized_cluster("h100x4")[1] == 4
    with pytest.raises(InputError, match="do not fill hosts of 8"):
        load_sized_cluster("h100x12")
    with pytest.raises(InputError, match="no cluster"):
        load_sized_cluster("h10x8")
    with pytest.raises(InputError, match="do not fit on cluster"):
        simulate_job(LLAMA, cluster, replace(layout_of(LLAMA), data_replicate=16))
