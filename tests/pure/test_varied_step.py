"""Steps whose passes vary and steps with one slow device, against sums written here."""

from dataclasses import replace
from math import sqrt
from statistics import NormalDist

import pytest

from interlace.config import DataConfig, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.model_config import ModelConfig
from interlace.strategy.job_layout import layout_of
from interlace.strategy.simulated_job import SimulatedJob, simulate_job
from interlace.strategy.varied_step import in_step, noisy_step, straggling_step

H100 = load_cluster("h100")
LLAMA = RunConfig(
    model=ModelConfig(
        layers=32, width=4096, heads=32, kv_heads=8, ffn_width=14336, vocab_size=128256
    ),
    data=DataConfig(sequence_length=4096),
    train=TrainConfig(micro_batches=8, micro_batch_size=1, dtype="bfloat16"),
    strands="1",
)


def simulated(schedule: str = "", **degrees: int | str) -> SimulatedJob:
    config = replace(LLAMA, parallel=ParallelConfig(**degrees))  # type: ignore[arg-type]
    if schedule:
        config = replace(config, pipeline=PipelineConfig(schedule=schedule), strands="2")
    return simulate_job(config, H100, layout_of(config))


def compute_s(found: SimulatedJob, stage: int) -> list[float]:
    """Of each action of a stage, without what it waits for."""
    costs = [found.passes[action.phase] for action in found.actions[stage]]
    return [(each.ns - sum(each.exposed.values())) / 1e9 for each in costs]


@pytest.mark.parametrize("pipeline", [1, 4])
def test_without_variation_nothing_changes(pipeline: int) -> None:
    found = simulated("zb_v" if pipeline > 1 else "", pipeline=pipeline, data_replicate=4)
    for varied in (noisy_step(found, 0), straggling_step(found, 1)):
        assert varied.seconds == pytest.approx(found.seconds, rel=1e-12)
        assert varied.more == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("degrees", [{}, {"tensor": 8}, {"data_shard": 8, "zero": 3}])
def test_a_straggler_of_one_stage_adds_its_compute(degrees: dict[str, int]) -> None:
    """And nothing to what is communicated, to the ends of the step and to the optimizer."""
    found = simulated(**degrees)
    expected = found.seconds + 0.5 * sum(compute_s(found, 0))
    assert straggling_step(found, 1.5).seconds == pytest.approx(expected, rel=1e-6)


def test_a_straggler_of_a_pipeline_holds_all_stages_up() -> None:
    """With many micro-batches a step is as long as what the slow stage has to do, and not longer
    than if all devices were as slow."""
    found = simulated("one_f_one_b", pipeline=4)
    slow = max(range(4), key=lambda stage: sum(compute_s(found, stage)))
    varied = straggling_step(found, 3)
    assert varied.seconds > 3 * sum(compute_s(found, slow))
    assert varied.seconds < 3 * found.seconds
    assert varied.more == pytest.approx(varied.seconds / found.seconds - 1)


@pytest.mark.parametrize("replicas", [16, 1024])
def test_the_latest_replica_is_that_of_as_many_normal_sums(replicas: int) -> None:
    """Passes of one device are independent, so that their sum has the root of the sum of squares as
    its deviation. 32 draws know it to an eighth."""
    found = simulated(data_replicate=replicas)
    assert in_step(found) == 1
    deviation = 0.05 * sqrt(sum(each**2 for each in compute_s(found, 0)))
    latest = NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))
    longer = noisy_step(found, 0.05).seconds - found.seconds
    assert longer == pytest.approx(latest * deviation, rel=0.35)


def test_who_goes_through_a_pass_together_waits_in_each() -> None:
    """Eight tensor ranks take the longest of eight draws each time, 1.42 deviations late on
    average; shards whose weights are gathered layer by layer too, those of ZeRO-1 do not."""
    tensor = simulated(tensor=8)
    assert in_step(tensor) == 8
    share = sum(compute_s(tensor, 0)) / tensor.seconds
    assert noisy_step(tensor, 0.02).more == pytest.approx(0.02 * 1.42 * share, rel=0.25)
    gathered, kept = (simulated(data_shard=8, zero=zero) for zero in (3, 1))
    assert (in_step(gathered), in_step(kept)) == (8, 1)
    assert noisy_step(gathered, 0.1).more > 1.5 * noisy_step(kept, 0.1).more


def test_more_noise_and_more_replicas_take_longer_and_always_the_same() -> None:
    few, many = (simulated("zb_h1", pipeline=4, data_replicate=count) for count in (2, 64))
    assert 0 < noisy_step(few, 0.02).more < noisy_step(few, 0.1).more
    assert noisy_step(few, 0.05).more < noisy_step(many, 0.05).more
    assert noisy_step(many, 0.05) == noisy_step(many, 0.05)


def test_what_is_no_deviation_or_no_straggler_is_refused() -> None:
    found = simulated()
    for wrong in (-0.1, 3.0, float("nan")):
        with pytest.raises(InputError, match="no deviation over a mean"):
            noisy_step(found, wrong)
    for wrong in (0.5, float("nan")):
        with pytest.raises(InputError, match="faster than the others"):
            straggling_step(found, wrong)
