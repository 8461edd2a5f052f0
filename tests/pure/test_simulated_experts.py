"""Simulated steps with experts, and with ranks that share sequences."""

from dataclasses import replace

import pytest

from interlace.cli.run_file import load_run_config
from interlace.config import DataConfig, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.expert_job import ExpertJob
from interlace.hardware.expert_times import grouped_matmul_s
from interlace.hardware.operator_times import matmul_s
from interlace.hardware.step_model import estimate_step
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.strategy.job_layout import layout_of, step_job
from interlace.strategy.rank_memory import kept_bytes, late_bytes, rank_memory, rank_parameters
from interlace.strategy.simulated_job import simulate_job

A100, H100 = load_cluster("a100-80"), load_cluster("h100")
MIB = 2**20
MIXTURE = RunConfig(
    model=ModelConfig(
        architecture="moe", layers=8, width=4096, heads=32, kv_heads=8, ffn_width=6400,
        vocab_size=32064, experts=ExpertsConfig(count=16, chosen=2),
    ),
    parallel=ParallelConfig(data_shard=16, expert=8),
    data=DataConfig(sequence_length=4096),
    train=TrainConfig(micro_batches=8, micro_batch_size=1, dtype="bfloat16"),
)  # fmt: skip
LLAMA = replace(
    MIXTURE, parallel=ParallelConfig(), data=DataConfig(sequence_length=65536),
    model=ModelConfig(layers=8, width=4096, heads=32, kv_heads=8, ffn_width=14336, vocab_size=512),
)  # fmt: skip


def simulated(config, cluster=A100, load=1.0, **parallel):
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return simulate_job(config, cluster, layout_of(config, expert_load=load))


def test_published_models_have_their_parameters():
    """In all, and for a token: from the papers, in billions (of Phi-3.5-MoE as in its preset)."""
    for name, whole, active in (
        ("mixtral-8x7b", 46.7, 12.9), ("phi-3.5-moe", 41.9, 6.6), ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2), ("deepseek-16b-moe", 16.4, 2.8),
        ("phi-31b-moe", 31.5, 5.0),
    ):  # fmt: skip
        config = load_run_config(name, {"train.dtype": "bfloat16"})
        job = step_job(config, layout_of(config))
        assert job.parameters / 1e9 == pytest.approx(whole, rel=0.01)
        per_token = job.multiplied_parameters + 2 * job.vocab * job.hidden
        assert per_token / 1e9 == pytest.approx(active, rel=0.03)


def test_a_grouped_matmul_is_its_matmuls_in_one_kernel():
    """One group is a matmul; few rows for each of many experts are as slow as their weights are
    read, and uneven tiles cost what they leave idle."""
    device = A100.device
    one = grouped_matmul_s(device, 1, 4096, 4096, 4096)
    assert one == pytest.approx(matmul_s(device, 4096, 4096, 4096))
    together = grouped_matmul_s(device, 8, 512, 4096, 4096)
    assert one <= together <= 8 * matmul_s(device, 512, 4096, 4096)
    weights = 2 * 64 * 4096 * 4096 / device.bytes_per_s
    assert grouped_matmul_s(device, 64, 1, 4096, 4096) == pytest.approx(weights, rel=0.05)


def test_rows_of_the_fullest_expert_and_its_rank():
    """By hand: 8 experts on 4 ranks; one with 3 times the mean leaves the others 5 / 7 each."""
    job = ExpertJob(count=8, chosen=2, ffn=64, ranks=4, load=3.0)
    assert job.fullest == pytest.approx((3 + 5 / 7) / 2)
    assert ExpertJob(count=8, chosen=2, ffn=64, ranks=8, load=3.0).fullest == 3
    assert ExpertJob(count=8, chosen=2, ffn=64, load=3.0).fullest == pytest.approx(1)
    with pytest.raises(InputError, match="between 1 and 4 times"):
        ExpertJob(count=8, chosen=2, ffn=64, load=5.0)


def test_two_strands_hide_rows_on_their_way():
    """Each micro-batch and layer exchanges rows four times; two strands hide most of it, and one
    only what gradients of weights cover."""
    two = simulated(MIXTURE)
    one = simulate_job(
        replace(MIXTURE, strands="1"), A100, layout_of(replace(MIXTURE, strands="1"))
    )
    assert one.exposed_s["ep"] > 0.5 * one.communication_s["ep"]
    assert two.exposed_s["ep"] < 0.3 * one.exposed_s["ep"]
    assert two.seconds < one.seconds
    links, job = one.step, one.job
    assert links.step_ns > 0
    rows = 2.0 * job.tokens * 2 * job.hidden  # bytes of a rank, in 16 bits
    sent = rows * 7 / 8 / A100.intra_host.bytes_per_s
    assert one.communication_s["ep"] > 8 * 8 * 4 * sent


def test_uneven_experts_take_time_and_memory():
    even, uneven = simulated(MIXTURE), simulated(MIXTURE, load=2.0)
    assert uneven.seconds > 1.05 * even.seconds
    assert uneven.peak.activations > even.peak.activations
    assert uneven.mfu < even.mfu
    alone = simulated(MIXTURE, expert=1)
    assert simulated(MIXTURE, load=2.0, expert=1).step == alone.step, "no rank waits for another"


def test_experts_are_shared_over_their_own_ranks():
    """Of 16 ranks by 8: two hold the same experts, and cut what they hold in two."""
    found = simulated(MIXTURE)
    layout, job = found.layout, found.job
    assert (layout.expert_group, layout.expert_replicas, layout.expert_shards) == (2, 1, 2)
    assert {"ep_dp_shard", "dp_shard", "ep", "ep_counts"} <= set(found.communication_s)
    parameters = rank_parameters(job, layout, job.layers, first=True, last=True)
    assert parameters.experts == 3 * 2 * 4096 * 6400 * 8
    held = rank_memory(job, layout, parameters, 0.0, last=True)
    assert held.masters == 4 * (parameters.dense / 16 + parameters.experts / 2)
    whole = simulated(MIXTURE, data_replicate=2, data_shard=8)
    assert whole.layout.expert_shards == 1
    assert "ep_dp_replicate" in whole.communication_s


TRACED_EXPERTS = {  # layers of width 1024, 1024 tokens, 8 experts of 512: MiB for each, traced
    (): (44.14, 48.02),
    (("tensor", 4),): (20.11, 22.52),
    (("chosen", 4),): (60.24, 62.02),
    (("experts_ffn", 1024),): (52.17, 54.02),
    (("data_shard", 4), ("expert", 4)): (44.14, 48.02),
    (("shared", 1024),): (52.14, 56.02),
    (("norm", "layer"),): (32.14, 36.02),
    (("norm", "layer"), ("tensor", 4)): (18.11, 20.02),
    (("query_key_norm", True),): (60.20, 64.02),
    (("recompute", "attention"),): (42.11, None),
    (("recompute", "layer"),): (2.05, 48.05),
    (("context", 2), ("data_shard", 2), ("expert", 4)): (23.07, None),
    (("context", 2), ("context_method", "ring"), ("expert", 2), ("tensor", 2)): (14.06, None),
}


@pytest.mark.parametrize("case", TRACED_EXPERTS)
def test_layers_of_experts_keep_what_traced_graphs_keep(case):
    changed = dict(case)
    experts = ExpertsConfig(
        count=8, chosen=changed.pop("chosen", 2), ffn_width=changed.pop("experts_ffn", 512),
        shared_width=changed.pop("shared", 0),
    )  # fmt: skip
    model = ModelConfig(
        architecture="moe", layers=2, width=1024, heads=8, kv_heads=8, ffn_width=4096,
        vocab_size=256, experts=experts, norm=changed.pop("norm", "rms"),
        query_key_norm=changed.pop("query_key_norm", False),
    )  # fmt: skip
    train = replace(MIXTURE.train, recompute=changed.pop("recompute", "none"))
    config = replace(
        MIXTURE, model=model, train=train, data=DataConfig(sequence_length=1024),
        parallel=ParallelConfig(**changed),
    )  # fmt: skip
    layout = layout_of(config)
    job, (kept, late) = step_job(config, layout), TRACED_EXPERTS[case]
    assert kept_bytes(job, layout) / MIB == pytest.approx(kept, rel=0.04)
    if late is not None:
        assert late_bytes(job, layout) / MIB == pytest.approx(late, rel=0.04)


TRACED_CONTEXT = {  # Llama of width 1024, 1024 tokens: MiB for each layer, kept and late
    ("ulysses", 2, 8, 1, "none"): (31.02, 28.0),
    ("ulysses", 4, 2, 1, "none"): (15.01, None),
    ("ulysses", 2, 8, 2, "none"): (16.51, None),
    ("ulysses", 2, 8, 1, "attention"): (30.0, None),
    ("ring", 2, 8, 1, "none"): (30.02, 28.0),
    ("ring", 4, 8, 1, "none"): (15.01, None),
    ("ring", 2, 8, 2, "none"): (16.01, None),
    ("ring", 2, 8, 1, "attention"): (30.02, None),
    ("ring", 2, 8, 1, "layer"): (1.0, 32.0),
}


@pytest.mark.parametrize("case", TRACED_CONTEXT)
def test_layers_of_shared_sequences_keep_what_traced_graphs_keep(case):
    method, context, kv_heads, tensor, recompute = case
    config = replace(
        LLAMA,
        model=ModelConfig(
            layers=2, width=1024, heads=8, kv_heads=kv_heads, ffn_width=4096, vocab_size=256
        ),
        data=DataConfig(sequence_length=1024),
        parallel=ParallelConfig(context=context, context_method=method, tensor=tensor),
        train=replace(LLAMA.train, recompute=recompute),
    )
    layout = layout_of(config)
    job, (kept, late) = step_job(config, layout), TRACED_CONTEXT[case]
    assert kept_bytes(job, layout) / MIB == pytest.approx(kept, rel=0.04)
    if late is not None:
        assert late_bytes(job, layout) / MIB == pytest.approx(late, rel=0.04)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_ranks_that_share_sequences(method):
    """They take a share of the time, exchange what one strand waits for, and two hide more of it;
    they keep a share of the values."""
    alone = simulated(LLAMA)
    two = simulated(LLAMA, context=4, context_method=method)
    assert alone.seconds / 4 < two.seconds < alone.seconds / 3
    assert two.peak.activations < 0.3 * alone.peak.activations
    assert two.communication_s["cp"] > 0
    one = simulated(replace(LLAMA, strands="1"), context=4, context_method=method)
    assert two.exposed_s["cp"] <= one.exposed_s["cp"] <= one.communication_s["cp"]
    assert two.job.model_flops == alone.job.model_flops


PLANNED_EXPERTS = {  # `interlace plan` of 8 layers in 2 stages: GiB of the rank that needs most
    "one_f_one_b": 1.002,
    "zb_h1": 1.110,
    "zb_v": 1.106,
    "folded": 1.277,
    "dual_pipe_v": 1.277,
    "interleaved": 1.210,
}


@pytest.mark.parametrize("schedule", PLANNED_EXPERTS)
def test_a_pipeline_of_experts_takes_the_memory_that_its_traced_plan_says(schedule):
    """Within 3 %, without weights that are gathered, which are small here."""
    model = ModelConfig(
        architecture="moe", layers=8, width=1024, heads=8, kv_heads=4, ffn_width=4096,
        vocab_size=4096, experts=ExpertsConfig(count=8, chosen=2, ffn_width=512),
    )  # fmt: skip
    config = replace(
        MIXTURE, model=model, data=DataConfig(sequence_length=2048),
        parallel=ParallelConfig(data_shard=4, expert=4, pipeline=2),
        pipeline=PipelineConfig(schedule=schedule),
    )  # fmt: skip
    found = simulated(config, H100)
    most = max(each.total - each.gathered for each in found.memory) / 2**30
    assert most == pytest.approx(PLANNED_EXPERTS[schedule], rel=0.03)


def test_a_pipeline_with_layers_without_experts_takes_what_its_traced_plan_says():
    """`interlace plan` of 8 layers, the first two without experts, in stages of 3 and 5: MiB of
    the rank that needs most, the first, without weights that are gathered."""
    experts = ExpertsConfig(count=8, chosen=2, ffn_width=512, dense_layers=2, capacity_factor=1.25)
    model = ModelConfig(
        architecture="moe", layers=8, width=1024, heads=8, kv_heads=4, ffn_width=4096,
        vocab_size=4096, experts=experts,
    )  # fmt: skip
    config = replace(
        MIXTURE, model=model, data=DataConfig(sequence_length=2048),
        parallel=ParallelConfig(data_shard=4, expert=4, pipeline=2),
        pipeline=PipelineConfig(schedule="one_f_one_b", split_at=("model.blocks.3",)),
    )  # fmt: skip
    found = simulated(config, H100)
    first, second = ((each.total - each.gathered) / MIB for each in found.memory)
    assert second < first == pytest.approx(980.5, rel=0.03)


def test_layers_of_both_kinds_take_the_time_of_each():
    """One strand: a model with some of either lies between those with all of one; two strands: each
    kind runs beside its own, and the head behind both."""

    def seconds(dense, strands):
        experts = replace(MIXTURE.model.experts, dense_layers=dense)
        model = replace(MIXTURE.model, experts=experts)
        return simulated(replace(MIXTURE, model=model, strands=strands)).seconds

    for strands in ("1", "2"):
        none, some, more = (seconds(dense, strands) for dense in (0, 2, 4))
        assert none - some == pytest.approx(some - more, rel=0.05)
        assert more < some < none
    assert seconds(2, "2") < seconds(2, "1")


def test_a_capacity_drops_rows_of_experts():
    """By hand: of 16 experts in pairs, each takes at most 1.25 times the mean; the fullest, which
    three times as many chose, so many, and the others 13 / 15."""

    def job(factor, load=1.0):
        experts = replace(MIXTURE.model.experts, capacity_factor=factor)
        config = replace(MIXTURE, model=replace(MIXTURE.model, experts=experts))
        return simulated(config, load=load)

    uneven, dropped = job(0.0, 3.0), job(1.25, 3.0)
    assert dropped.job.experts.fullest == pytest.approx((1.25 + 13 / 15) / 2)
    assert dropped.job.experts.kept == pytest.approx((1.25 + 13) / 16)
    assert dropped.seconds < uneven.seconds
    assert dropped.peak.activations < uneven.peak.activations
    even = job(1.0)
    assert (even.job.experts.fullest, even.job.experts.kept) == (1, 1)
    assert 0 < even.seconds - job(0.0).seconds < 0.001 * even.seconds, "the router does more"
    half = job(0.5)
    assert (half.job.experts.fullest, half.job.experts.kept) == (0.5, 0.5)


def test_what_is_still_refused():
    sends = replace(MIXTURE.parallel, expert_sends="merged")
    with pytest.raises(InputError, match="expert_sends = 'merged'"):
        layout_of(replace(MIXTURE, parallel=sends))
    with pytest.raises(InputError, match="the model has no experts"):
        layout_of(LLAMA, expert_load=2.0)
    with pytest.raises(InputError, match="not known to step_model"):
        estimate_step(A100, step_job(MIXTURE, layout_of(MIXTURE)))
