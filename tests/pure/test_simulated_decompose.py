"""Decomposed collectives simulated from shapes: sites take what formulas say, steps what traced
graphs say."""

from dataclasses import replace

import pytest

from interlace.config import DataConfig, OverlapConfig, ParallelConfig, RunConfig, TrainConfig
from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.ir.graph import Kind
from interlace.model_config import ExpertsConfig, ModelConfig
from interlace.sim.decomposed import by_expert_ns, decomposed_ns
from interlace.sim.lanes import simulate
from interlace.strategy.contributions import contributions
from interlace.strategy.decomposed_operators import CutCollective, gathered_matmul, scattered_matmul
from interlace.strategy.expert_operators import ExpertTimes, experts_there
from interlace.strategy.job_layout import layout_of
from interlace.strategy.simulated_job import parts_of, simulate_job
from interlace.strategy.timed_graph import TimedGraph

H100 = load_cluster("h100")
LLAMA = RunConfig(
    model=ModelConfig(
        layers=2, width=4096, heads=32, kv_heads=32, ffn_width=14336, vocab_size=4096
    ),
    parallel=ParallelConfig(tensor=4),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(micro_batches=4, micro_batch_size=1, dtype="bfloat16"),
)


def simulated(config, decompose, strands="2", pieces=0):
    overlap = OverlapConfig(decompose=decompose, pieces=pieces)
    config = replace(config, strands=strands, overlap=overlap)
    return simulate_job(config, H100, layout_of(config))


def alone_ns(graph):
    """Of operators in the order in which they were written, with nothing that slows them."""
    return simulate(graph.graph, graph.graph.order, graph.solo_ns).length_ns


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("transfer_us", [3, 10, 40])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_site_takes_what_the_formula_says(ring, transfer_us, pieces):
    """Both forms: t_c + max((N m - 1) t_c, (N - 1) m t_p), as `sim.decomposed`; of a ring whose
    sends wait for each other too."""
    cut = CutCollective(
        kind=Kind.SEND, ranks=4, pieces=pieces, ring=ring, compute_s=10e-6,
        transfer_s=transfer_us * 1e-6, moved=1.0,
    )  # fmt: skip
    expected = decomposed_ns(10_000, 1000 * transfer_us, ranks=4, pieces=pieces)
    assert cut.seconds * 1e9 == pytest.approx(expected)
    gathers, scatters = TimedGraph("gathers"), TimedGraph("scatters")
    gathered_matmul(gathers, cut, "gather", "matmul", "", ())
    done = scattered_matmul(scatters, cut, "matmul", "scatter", ())
    assert alone_ns(gathers) == expected
    # What arrives in a scatter is added behind the slice that it is for: the own one is last.
    assert alone_ns(scatters) == pytest.approx(expected, abs=1000 * transfer_us)
    assert done


def test_slices_are_collectives_of_their_own():
    """One collective of four has nothing beside it: the first of a gather, the last of a sum."""
    cut = CutCollective(
        kind=Kind.ALL_GATHER, ranks=4, pieces=4, ring=False, compute_s=10e-6, transfer_s=4e-6,
        moved=1.0,
    )  # fmt: skip
    gathers, sums = TimedGraph("gathers"), TimedGraph("sums")
    gathered_matmul(gathers, cut, "gather", "matmul", "", ())
    scattered_matmul(sums, cut, "matmul", "sum", ())
    assert alone_ns(gathers) == alone_ns(sums) == 44_000
    assert cut.seconds * 1e9 == pytest.approx(44_000)


def test_groups_of_experts_take_what_the_formula_says():
    seconds = {
        "router": 1e-6, "sorted": 1e-6, "joined": 1e-6, "counted": 0.0, "experts up": 40e-6,
        "experts activation": 8e-6, "experts down": 32e-6,
    }  # fmt: skip
    times = ExpertTimes(counts_s=0.0, rows_s=15e-6, rows_bytes=8.0, shared=False, groups=4)
    graph = TimedGraph("experts")
    experts_there(graph, times, seconds, "0", ("", ""), again=True)
    assert alone_ns(graph) == 3000 + by_expert_ns(20_000, 15_000, groups=4)


TRACED = {  # `interlace plan --cluster h100 --overlap.passes all`: ms of one strand and of two
    "off": (66.8, 58.2),
    "ring": (64.3, 59.0),
    "slicing": (69.3, 63.0),
}


@pytest.mark.parametrize("decompose", ["ring", "slicing"])
@pytest.mark.parametrize("strands", ["1", "2"])
def test_a_step_changes_as_that_of_traced_graphs_does(decompose, strands):
    """Relative to whole collectives, within 4 points, and in the same direction."""
    traced = TRACED[decompose][int(strands) - 1] / TRACED["off"][int(strands) - 1]
    whole, cut = (simulated(LLAMA, each, strands).seconds for each in ("off", decompose))
    assert cut / whole == pytest.approx(traced, abs=0.04)
    assert (cut > whole) == (traced > 1)


def test_what_is_sent_is_hidden_under_its_own_matmul():
    whole, ring = (simulated(LLAMA, each, "1") for each in ("off", "ring"))
    assert ring.exposed_s["tp"] < 0.25 * whole.exposed_s["tp"]
    assert ring.peak == whole.peak
    found = {each.technique: each.seconds for each in contributions(ring)}
    assert found["decompose ring"] == whole.seconds
    assert simulated(LLAMA, "ring", "1", pieces=4).seconds != ring.seconds


def test_auto_leaves_whole_what_gains_nothing():
    """Beside another strand nothing is cut that makes a pair slower, and one rank has nothing to
    cut."""
    assert simulated(LLAMA, "auto").seconds <= 1.001 * simulated(LLAMA, "off").seconds
    assert simulated(LLAMA, "ring").seconds > simulated(LLAMA, "off").seconds
    alone = replace(LLAMA, parallel=ParallelConfig())
    assert simulated(alone, "ring").step == simulated(alone, "off").step


def test_exchanges_of_experts_are_cut_by_groups():
    """Of 4 experts on a rank: the rows of one half come while those of the other are computed."""
    model = replace(
        LLAMA.model, architecture="moe",
        experts=ExpertsConfig(count=16, chosen=2, ffn_width=4096, dense_layers=1),
    )  # fmt: skip
    config = replace(LLAMA, model=model, parallel=ParallelConfig(data_shard=16, expert=4, zero=1))
    whole, cut = simulated(config, "off", "1"), simulated(config, "ring", "1", pieces=2)
    assert cut.exposed_s["ep"] < whole.exposed_s["ep"]
    assert cut.communication_s["ep"] >= whole.communication_s["ep"]
    experts = parts_of(cut.config, H100, cut.layout).times.operators.experts
    assert (experts.groups, experts.rows_bytes) == (2, 2.0 * 8192 * 2 * 4096)
    one = replace(config, parallel=ParallelConfig(data_shard=16, expert=16, zero=1))
    assert simulated(one, "ring", "1").step == simulated(one, "off", "1").step, "one expert a rank"


def test_ends_alone_are_refused():
    overlap = OverlapConfig(decompose="ring", passes="ends")
    with pytest.raises(InputError, match=r"overlap\.passes = 'ends'"):
        layout_of(replace(LLAMA, overlap=overlap))
