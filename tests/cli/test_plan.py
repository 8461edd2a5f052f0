"""`interlace plan` as typed: what it writes where, costs from a file, and requests it refuses."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from interlace.__main__ import main
from interlace.cli.run_file import load_run_config
from interlace.config import ParallelConfig
from interlace.graphs.torch_private import init_fake_world
from interlace.ir import plan as plans
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.parallel.meshes import (
    COUNTS_AXIS,
    EXPERT_AXIS,
    axis_groups,
    axis_sizes,
    build_meshes,
)
from interlace.train import planning
from interlace.train.fake_trace import trace_fake
from interlace.train.plan_costs import computed_costs

OVERRIDES = {
    "parallel.tensor": "2",
    "model.layers": "1",
    "link.rate": "1gbit",
    "hardware.peak_tflops": "1",
    "hardware.memory_gb_per_s": "10",
}
SMALL = ["quickstart", "--plan.search=list", *(f"--{k}={v}" for k, v in OVERRIDES.items())]


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch):
    """The machine that runs the tests may itself be a SLURM or torchrun job."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_tracing(monkeypatch):
    """A request that cannot work is refused before a minute of tracing, not after it."""

    def trace(*_):
        pytest.fail("traced")

    monkeypatch.setattr(planning, "trace_fake", trace)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A cost file for `SMALL`, in the form that `interlace profile` writes."""
    config = load_run_config("quickstart", OVERRIDES)
    strands = trace_fake(config).whole
    costs, _ = computed_costs(config, strands.op_graphs)
    path = tmp_path_factory.mktemp("costs") / "cost.json"
    fields = {name: getattr(costs, name) for name in ("operators", "issue_ns")}
    store.save(CostTable(**fields, source="profile", graph_digest=strands.digest), path)
    return path


def test_everything_is_written(tmp_path, capsys):
    """Plan, JSON and picture agree; tables and file names go to stderr, stdout stays empty."""
    plan, figures, picture = (tmp_path / name for name in ("new/plan.txt", "p.json", "p.png"))
    arguments = ["-o", str(plan), "--json", str(figures), "--picture", str(picture)]
    assert main(["plan", *SMALL, *arguments, "--compare-searches"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("tracing 1 layers", "search merge ... ", "list *", "one strand", "memory of"):
        assert words in err
    assert all(f"wrote {path}" in err for path in (plan, figures, picture))
    document = json.loads(figures.read_text())
    read = plans.read(plan)
    assert document["plan"]["digest"] == read.digest
    assert document["chosen"] == read.search == "list"
    assert set(document["searches"]) == {"merge", "list", "segment_pairs"}
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_constant_memory_by_hand(tmp_path):
    """One layer of quickstart over two ranks: elements of each split and whole weight."""
    config = load_run_config("quickstart", OVERRIDES | {"train.dtype": "bfloat16"})
    module = trace_fake(config).whole.module
    held = planning.constant_bytes(config.parallel, config.train.dtype, module, None)
    vocabulary, width, ffn = 256, 128, 256
    split = 2 * vocabulary * width + 4 * width * width + 3 * width * ffn
    elements = split // 2 + 3 * width
    rotary = 2 * 4 * 128 * 16
    assert held == {
        "weights": 2 * elements,
        "float32 masters": 4 * elements,
        "gradient sums": 4 * elements,
        "optimizer state": 8 * elements,
        "buffers": rotary,
    }


def test_plan_is_all_of_stdout(capsys):
    """Without a file the plan itself is what can be piped."""
    assert main(["plan", *SMALL]) == 0
    out, _ = capsys.readouterr()
    assert plans.from_text(out).search == "list"


def test_one_layer_of_70b_on_64_ranks(capsys):
    """Its weights alone would take 5 GB in one process; a rank's share is counted, none is made."""
    assert main(["plan", "llama-70b", "--model.layers", "1"]) == 0
    _, err = capsys.readouterr()
    assert "tracing 1 layers, one of 64 ranks" in err
    width, ffn, vocabulary = 8192, 28672, 32000
    split = 4 * width**2 + 3 * width * ffn + 2 * vocabulary * width
    assert f"(weights {2 * (split // 64 + 3 * width) / 2**20:.1f} MiB, " in err


def test_costs_of_a_file(measured, capsys):
    """A table of this graph is taken as it is, and is named."""
    assert main(["plan", *SMALL, "--cost", str(measured)]) == 0
    out, err = capsys.readouterr()
    assert f"costs: profile, {measured}" in err
    assert plans.from_text(out).cost_digest == store.load(measured, CostTable).digest


def test_costs_of_another_graph(measured, capsys):
    """Refused with both digests; with --interpolate what is estimated is counted and named."""
    wider = ["plan", *SMALL, "--model.ffn_width", "512", "--cost", str(measured)]
    assert main(wider) == 2
    _, err = capsys.readouterr()
    digest = store.load(measured, CostTable).graph_digest
    assert f"{measured} was made for graph {digest}, and this run has graph" in err
    assert "--interpolate" in err
    assert main([*wider, "--interpolate"]) == 0
    _, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("estimated: "))
    assert "forward.mm" in line
    assert line.endswith(", ...")


ON_A_CLUSTER = [word for word in SMALL if not word.startswith(("--link", "--hardware"))]
HOSTS_OF_ONE = """
name = "apart"
devices_per_host = 1
hosts = 2
peak_tflops = 312
memory_gb_per_s = 2039
memory_gib = 74.5
sms = 108

[intra_host]
gb_per_s = 200
efficiency = 0.78
step_latency_us = 3.4
sms_held = 16

[inter_host]
gbit_per_s = 200
efficiency = 0.74
step_latency_us = 14
sms_held = 8
"""


def test_times_of_a_cluster(tmp_path, capsys):
    """Two ranks are neighbours in a host of A800s; in hosts of one device they use the network,
    and communication takes longer."""
    (tmp_path / "apart.toml").write_text(HOSTS_OF_ONE)
    shown = {"a800": "tp inside hosts", str(tmp_path / "apart.toml"): "tp across hosts"}
    communication = []
    for cluster, where in shown.items():
        file = tmp_path / "plan.json"
        arguments = ["--cluster", cluster, "--json", str(file)]
        assert main(["plan", *ON_A_CLUSTER, *arguments]) == 0
        _, err = capsys.readouterr()
        assert (
            f"costs: computed for cluster {Path(cluster).stem}: 312 TFLOP/s (of bfloat16; " in err
        )
        assert f"and 2039 GB/s; {where}" in err
        document = json.loads(file.read_text())
        assert document["costs"]["description"].startswith("computed for cluster")
        communication.append(document["one_strand"]["step"]["communication_ns"])
    assert communication[1] > communication[0] > 0


def test_groups_of_an_axis_are_those_of_its_mesh():
    """The innermost axis has consecutive ranks, as torch lays them out."""
    config = ParallelConfig(data_replicate=2, data_shard=2, context=2, tensor=2)
    groups = axis_groups(config)
    init_fake_world(16)
    try:
        meshes = build_meshes(config, "cpu")
        found = {
            name: tuple(dist.get_process_group_ranks(mesh.get_group(name)))
            for mesh, name in (
                (meshes.weights, "dp_replicate"),
                (meshes.weights, "dp_shard"),
                (meshes.layout, "cp"),
                (meshes.weights, "tp"),
            )
        }
    finally:
        dist.destroy_process_group()
    assert found == {axis: each[0] for axis, each in groups.items()}
    for axis, each in groups.items():
        assert {len(group) for group in each} == {axis_sizes(config)[axis]}
        assert sorted(rank for group in each for rank in group) == list(range(16))


def test_counts_have_a_group_of_the_same_ranks_of_its_own():
    """Also where the ranks of `ep` are all of the job, whose group is the default one."""
    for ranks, config in (
        (2, ParallelConfig(data_replicate=2, expert=2)),
        (8, ParallelConfig(data_replicate=2, data_shard=4, expert=2)),
    ):
        init_fake_world(ranks)
        try:
            meshes = build_meshes(config, "cpu")
            assert meshes.experts is not None
            assert meshes.counts is not None
            rows = meshes.experts.get_group(EXPERT_AXIS)
            names = meshes.axis_of_group
            assert names[str(rows.group_name)] == EXPERT_AXIS
            assert names[str(meshes.counts.group_name)] == COUNTS_AXIS
            found = [dist.get_process_group_ranks(group) for group in (rows, meshes.counts)]
            assert found == [list(axis_groups(config)[COUNTS_AXIS][0])] * 2
        finally:
            dist.destroy_process_group()


def test_a_chosen_search_that_does_not_fit(capsys):
    """The memory bound is a request like any other."""
    assert main(["plan", *SMALL, "--plan.memory_mib", "0.01"]) == 2
    _, err = capsys.readouterr()
    assert "more than the bound" in err
    assert "hint: " in err


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("--output {folder}", "--output {folder} is a folder", "name of a file"),
        ("--output /dev/null", "--output /dev/null is not a regular file", "name of a file"),
        ("--json {file}/x.json", "--json {file}/x.json: cannot write below", "another file"),
        ("--json {file} --cost {file}", "--cost and --json are both {file}", "of its own"),
        ("-o {folder}/a --json {folder}/a", "--output and --json are both", "of its own"),
        ("--picture {folder}/a.jpg", "a.jpg is not a .png file", ".png"),
        ("--interpolate", "--interpolate estimates what a cost file lacks", "--cost"),
        ("--cost {folder}/none.json", "cannot read {folder}/none.json", "interlace profile"),
        ("--cost {folder}", "cannot read {folder}", "interlace profile"),
        ("--cost {file}", "{file} is not valid JSON", "interlace profile"),
        ("--cost {newer}", "{newer} is not a valid CostTable", "this version"),
        ("--cluster a800", "and so does the run: hardware.peak_tflops = 1.0, ", "--link.rate ''"),
        ("{plain} --cluster a80", "there is no cluster 'a80'", "did you mean 'a800'?"),
        ("{plain} --cluster {folder}/x.toml", "there is no cluster file {folder}/x.toml", "h200"),
        ("{plain} --cluster {half}", "{half}, line 1: ", "starts with [name]"),
        ("{plain} --cluster {small}", "{small}, line 4: hosts = -3 must be 0 or more", "hosts"),
        ("{plain} --cluster {one}", "2 ranks do not fit on cluster apart: 1 hosts of 1", "fewer"),
        ("--cluster a800 --cost {file}", "--cost {file} and --cluster a800 both", "one of the two"),
        ("--plan.search wombat", 'must be one of "merge", "list", "segment_pairs"', "as in"),
        ("--plan.file plan.txt", "plan.file = 'plan.txt' is a plan already", "leave it out"),
        ("--strands 1 --train.micro_batches 1", "pairs two micro-batches", "2 or more"),
        ("--model.kv_heads 3", "is not a multiple of model.kv_heads", "divisor"),
    ],
)
@pytest.mark.usefixtures("no_tracing")
def test_requests_that_cannot_work(tmp_path, capsys, measured, arguments, message, hint):
    """Exit code 2 and what to do about it, before anything slow; nothing is left behind."""
    half, newer = tmp_path / "half.json", tmp_path / "newer.json"
    text = measured.read_text()
    half.write_text(text[: len(text) // 2])
    newer.write_text(json.dumps(json.loads(text) | {"power_watts": 3}))
    small, one = tmp_path / "small.toml", tmp_path / "one.toml"
    small.write_text(HOSTS_OF_ONE.replace("hosts = 2", "hosts = -3"))
    one.write_text(HOSTS_OF_ONE.replace("hosts = 2", "hosts = 1"))
    names = {"folder": tmp_path, "file": half, "newer": newer, "half": half}
    names |= {"small": small, "one": one, "plain": ""}
    given = ON_A_CLUSTER if arguments.startswith("{plain}") else SMALL
    before = sorted(tmp_path.iterdir())
    words = [word for word in given if not word.startswith("--plan.search")]
    assert main(["plan", *words, *arguments.format(**names).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message.format(**names) in err
    assert hint in err
    assert sorted(tmp_path.iterdir()) == before
