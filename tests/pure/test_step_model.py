"""The step model counts what published models count, and parts of a step go the right way."""

from dataclasses import replace

import pytest

from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.layer_times import head_passes, layer_passes
from interlace.hardware.step_job import StepJob
from interlace.hardware.step_memory import layer_activation_bytes, peak_memory, stage_memory
from interlace.hardware.step_model import estimate_step

A100 = load_cluster("a100-80")
GPT_175B = StepJob(
    layers=96,
    hidden=12288,
    heads=96,
    ffn=4 * 12288,
    vocab=51200,
    sequence=2048,
    micro_batch=1,
    micro_batches=64,
    tensor=8,
    pipeline=8,
    attention="unfused",
)
LLAMA_8B = StepJob(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
    sequence=8192,
    micro_batch=1,
    micro_batches=1,
    data=8,
    sharding=3,
    gated=True,
)


def test_parameters_and_multiplications_are_the_published_ones() -> None:
    """GPT 175B and Llama 8B; 72 B l s h^2 (1 + s / 6h + V / 12 l h) of Narayanan et al."""
    assert GPT_175B.parameters == pytest.approx(174.6e9, rel=0.002)
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=0.002)
    job = GPT_175B
    inner = 1 + job.sequence / (6 * job.hidden) + job.vocab / (12 * job.layers * job.hidden)
    flops = 72 * 64 * job.layers * job.sequence * job.hidden**2 * inner
    assert job.model_flops == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "bytes_per_unit"),
    [
        # Korthikanti et al., arXiv 2205.05198, table 2, with a s / h = 16: s b h times this.
        ({"tensor": 1}, 34 + 5 * 16),
        ({"sequence_parallel": False}, 10 + 24 / 8 + 5 * 16 / 8),
        ({}, (34 + 5 * 16) / 8),
        ({"recompute": "attention"}, 34 / 8),
        ({"recompute": "full"}, 2 / 8),
        ({"attention": "newest"}, 34 / 8),
    ],
)
def test_activations_are_those_of_the_table(change: dict, bytes_per_unit: float) -> None:
    """Bytes of one layer, exactly: the model counts the same tensors."""
    job = replace(GPT_175B, **change)
    found = layer_activation_bytes(job) / (job.tokens * job.hidden)
    assert found == pytest.approx(bytes_per_unit, rel=1e-9)


def test_the_first_stage_holds_the_most_micro_batches() -> None:
    """1F1B: stage 0 as many as there are stages; interleaved more; sharded optimizers less."""
    stages = [stage_memory(GPT_175B, stage).activations_bytes for stage in range(8)]
    assert stages == sorted(stages, reverse=True)
    assert stages[0] == pytest.approx(8 * stages[7])
    chunks = stage_memory(replace(GPT_175B, chunks=2), 0).activations_bytes
    assert stages[0] < chunks < 1.6 * stages[0]
    wide = replace(GPT_175B, data=8)
    parts = [peak_memory(replace(wide, sharding=sharding)).total_bytes for sharding in range(4)]
    assert parts == sorted(parts, reverse=True)
    assert len(set(parts)) == 4


def test_a_step_is_the_sum_of_its_parts() -> None:
    """And each part is there when it should be."""
    found = estimate_step(A100, GPT_175B)
    parts = found.compute_s + found.tensor_s + found.sends_s
    parts += found.bubble_s + found.gradients_s + found.optimizer_s
    assert found.seconds == pytest.approx(parts)
    assert 0.3 < found.mfu < 0.6
    alone = estimate_step(A100, replace(GPT_175B, tensor=1, pipeline=1))
    assert alone.tensor_s == alone.sends_s == alone.bubble_s == alone.gradients_s == 0
    peak = A100.peak_tflops * 1e12
    assert found.mfu == pytest.approx(GPT_175B.model_flops / (found.seconds * 64 * peak))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"micro_batches": 128}, "compute_s"),
        ({"recompute": "full"}, "compute_s"),
        ({"recompute": "attention"}, "compute_s"),
        ({"recompute": "alternate"}, "compute_s"),
        ({"fused_operators": False}, "compute_s"),
        ({"data": 8, "micro_batches": 8}, "gradients_s"),
        ({"tensor": 16}, "tensor_s"),
        ({"pipeline": 16}, "bubble_s"),
        ({"chunks": 4}, "sends_s"),
    ],
)
def test_more_of_it_takes_longer(change: dict, part: str) -> None:
    """One part of the step grows with what makes it."""
    before, after = (estimate_step(A100, job) for job in (GPT_175B, replace(GPT_175B, **change)))
    assert getattr(after, part) > getattr(before, part)


def test_chunks_and_overlap_take_less() -> None:
    """Interleaving divides the bubble; a sum under the last backward is exposed for a layer."""
    plain, chunks = (estimate_step(A100, replace(GPT_175B, chunks=c)) for c in (1, 4))
    assert chunks.bubble_s == pytest.approx(plain.bubble_s / 4, rel=0.1)
    wide = replace(GPT_175B, data=8, micro_batches=8, micro_batch=4)
    under = estimate_step(A100, replace(wide, overlap_gradients=True))
    assert under.gradients_s < estimate_step(A100, wide).gradients_s / 2


def test_sharded_weights_are_gathered_under_compute_or_not() -> None:
    """Between fast ports next to nothing shows; between slow ones the gathers are the step."""
    fast = estimate_step(A100, replace(LLAMA_8B, data=64))
    thin = replace(A100, inter_host=replace(A100.inter_host, gbit_per_s=5))
    slow = estimate_step(thin, replace(LLAMA_8B, data=64))
    traffic_s = 4 * 2 * LLAMA_8B.layers * LLAMA_8B.layer_parameters / (8 * 5e9 / 8 * 0.85)
    assert slow.compute_s == pytest.approx(traffic_s, rel=0.1)
    assert fast.compute_s < slow.compute_s / 4


def test_backward_takes_longer_and_the_head_has_a_price() -> None:
    """Twice the matmuls; a vocabulary of 128k costs as much as several layers."""
    forward, backward = layer_passes(A100, A100.device, LLAMA_8B)
    assert 1.7 * forward.compute_s < backward.compute_s < 2.6 * forward.compute_s
    head = sum(each.seconds for each in head_passes(A100, A100.device, LLAMA_8B))
    layer = forward.seconds + backward.seconds
    assert 2 * layer < head < 6 * layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "hidden = 12288 does not split into 7 heads"),
        ({"layers": 7}, "7 layers do not fill 8 stages of 1 chunks"),
        ({"pipeline": 1, "chunks": 2}, "chunks without a pipeline"),
        ({"micro_batch": 0}, "micro_batch = 0"),
        ({"tensor": -1}, "tensor = -1"),
    ],
)
def test_impossible_jobs_are_refused(change: dict, message: str) -> None:
    """With what to set."""
    with pytest.raises(InputError, match=message) as caught:
        replace(GPT_175B, **change)
    assert caught.value.hint


def test_a_job_must_fit_the_cluster() -> None:
    """If its file says how many hosts there are."""
    with pytest.raises(InputError, match="64 ranks do not fit on cluster a100-80"):
        estimate_step(replace(A100, hosts=4), GPT_175B)
