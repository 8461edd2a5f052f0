"""Cluster files are read strictly, and collective times follow published measurements."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.errors import InputError
from interlace.hardware.cluster import Cluster, cluster_files, load_cluster
from interlace.ir.graph import Kind

HOST = tuple(range(8))
NAMES = ["a100-40", "a100-80", "a40", "a800", "b200", "gb200", "gh200", "h100", "h200"]
NAMES += ["h800", "laptop", "v100"]


def test_every_preset_can_be_read() -> None:
    """Each file has the name that finds it, and values in the units of its keys."""
    assert list(cluster_files()) == NAMES
    for name in NAMES:
        cluster = load_cluster(name)
        assert cluster.name == name
        assert name == "laptop" or 100 < cluster.peak_tflops <= 2500
        assert cluster.device.memory_bytes > 2**32
        # An NVLink or PCIe port is faster than a network port.
        assert cluster.intra_host.bytes_per_s > cluster.inter_host.bytes_per_s > 1e8


GOOD = (Path(__file__).parents[2] / "src/interlace/presets/clusters/a800.toml").read_text()


def _load(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return load_cluster(str(file))


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    """A copied preset reads the same, and whole numbers are taken where numbers are wanted."""
    assert _load(tmp_path, GOOD) == load_cluster("a800")
    assert type(_load(tmp_path, GOOD).peak_tflops) is float


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gb_per_s = 200", "gbps = 200", r"mine\.toml, line 14: unknown key intra_host\.gbps"),
        ("sms = 108\n", "", "sms is missing"),
        ("sms = 108", "sms = 108.5", r"sms = 108\.5 must be a whole number"),
        ("sms = 108", "sms = true", "sms = True must be a whole number"),
        ("peak_tflops = 312", 'peak_tflops = "312"', "peak_tflops = '312' must be a number"),
        ("peak_tflops = 312", "peak_tflops = nan", "peak_tflops = nan must be a number"),
        ("peak_tflops = 312", "peak_tflops = 0", "peak_tflops = 0 must be above 0"),
        ("efficiency = 0.78", "efficiency = 78", r"intra_host\.efficiency = 78 must be a fraction"),
        ("gbit_per_s = 200", "gbit_per_s = -1", r"inter_host\.gbit_per_s = -1 must be above 0"),
        (
            "step_latency_us = 14",
            "",
            r"mine\.toml, line 19: inter_host\.step_latency_us is missing",
        ),
        (
            "sms = 108",
            "sms = 108\nhosts = -1",
            r"mine\.toml, line 10: hosts = -1 must be 0 or more",
        ),
        ('name = "a800"', "name = 800", "name = 800 must be text"),
        ("[inter_host]", "[inter_hosts]", "unknown key inter_hosts"),
        ("[intra_host]", "[intra_host", r"mine\.toml, line 12: Expected"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The message names the file, the key and the value; the hint says what to write."""
    assert old in GOOD
    with pytest.raises(InputError, match=message) as caught:
        _load(tmp_path, GOOD.replace(old, new))
    assert "mine.toml" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("memory_gib = 74.5", "memory_gb = 80", r"give memory_gib, in 2\*\*30 bytes"),
        ("gb_per_s = 200", "gbit_per_s = 1600", r"give gb_per_s, in 1e9 byte/s"),
        ("step_latency_us = 14", "step_latency_ns = 14000", "give step_latency_us, in microsec"),
        ("peak_tflops = 312", "peak_pflops = 0.312", "give peak_tflops, in 1e12 floating"),
        ("gb_per_s = 200", 'gb_per_s = "200 GB/s"', "the number alone: .*gb_per_s is in 1e9 byte"),
        ('gpu = "A100"', 'gpu = "A10"', "did you mean 'A100'"),
        ('link = "nvlink3"', 'link = "nvlink"', "did you mean 'nvlink"),
        ('link = "nvlink3"', "island = 4", "give both, or neither"),
    ],
)
def test_another_unit_gets_a_hint(tmp_path: Path, old: str, new: str, hint: str) -> None:
    """It says which key to give, and in what."""
    with pytest.raises(InputError) as caught:
        _load(tmp_path, GOOD.replace(old, new, 1))
    assert re.search(hint, caught.value.hint), caught.value.hint
    assert "mine.toml, line" in caught.value.message


def test_a_cluster_may_have_so_many_hosts(tmp_path: Path) -> None:
    """Without the key there are as many as are asked for."""
    load_cluster("a800").require(10**6)
    two = _load(tmp_path, GOOD.replace("sms = 108", "sms = 108\nhosts = 2"))
    two.require(16)
    with pytest.raises(InputError, match="17 ranks do not fit on cluster a800: 2 hosts of 8"):
        two.require(17)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """A name gets the nearest preset as a hint, a path the list of them."""
    with pytest.raises(InputError, match="there is no cluster 'a80'") as caught:
        load_cluster("a80")
    assert "a800" in caught.value.hint
    with pytest.raises(InputError, match=r"no cluster file .*none\.toml") as caught:
        load_cluster(str(tmp_path / "none.toml"))
    assert "h200" in caught.value.hint


def _a100() -> Cluster:
    """The node of the measurements: an A800's with full NVLink."""
    a800 = load_cluster("a800")
    return replace(a800, intra_host=replace(a800.intra_host, gb_per_s=300))


def _b200() -> Cluster:
    """NVLink 5 and 400 Gbit/s ports."""
    h200 = load_cluster("h200")
    return replace(h200, intra_host=replace(h200.intra_host, gb_per_s=900))


@pytest.mark.parametrize(
    ("cluster", "kind", "ranks", "full_bytes", "measured_us"),
    [
        # nccl-tests published by NetX-lab/Echo: A100 40 GB, Azure ND v4.
        (_a100(), Kind.ALL_REDUCE, 8, 2**25, 361.0),
        (_a100(), Kind.ALL_REDUCE, 8, 2**26, 566.1),
        (_a100(), Kind.ALL_REDUCE, 8, 2**28, 2096.0),
        (_a100(), Kind.ALL_REDUCE, 8, 2**30, 8139.2),
        (_a100(), Kind.ALL_REDUCE, 4, 2**28, 1865.4),
        # stas00/ml-engineering, network/README.md: ring on one node of 8 H200 ...
        (load_cluster("h200"), Kind.ALL_GATHER, 8, 2**34, 41594.9),
        (load_cluster("h200"), Kind.REDUCE_SCATTER, 8, 2**34, 41422.9),
        # ... and four hosts of 8 B200.
        (_b200(), Kind.ALL_REDUCE, 32, 2**30, 5747.1),
        (_b200(), Kind.ALL_REDUCE, 32, 2**34, 87181.8),
    ],
)
def test_times_are_near_measured_ones(
    cluster: Cluster, kind: Kind, ranks: int, full_bytes: int, measured_us: float
) -> None:
    """Within 16 % of published nccl-tests for tensors of 32 MiB and more."""
    modelled_us = cluster.collective_ns(kind, full_bytes, range(ranks)) / 1e3
    assert modelled_us == pytest.approx(measured_us, rel=0.16)


def test_a_group_uses_the_link_that_joins_it() -> None:
    """Ranks of one host use the host's link; two hosts the network, where latency is higher."""
    cluster = load_cluster("a800")
    assert cluster.link_of(HOST) == "intra_host"
    assert cluster.link_of((0, 8)) == "inter_host"
    assert cluster.sms_held(HOST) == cluster.intra_host.sms_held
    assert cluster.collective_ns(Kind.ALL_GATHER, 2**20, (0,)) == 0
    empty = [cluster.collective_ns(Kind.ALL_GATHER, 0, ranks) for ranks in (HOST, (0, 8))]
    assert empty == [8_400 + 7 * 3_400, 8_400 + 14_000]


def test_ports_of_a_host_share_a_gathered_tensor() -> None:
    """Two hosts of two devices gather twice as fast as one device of each: every port carries its
    part. Pieces of an all-to-all cannot be shared. An all-reduce moves twice the bytes."""
    cluster = replace(load_cluster("a800"), devices_per_host=2)
    large = 2**34

    def seconds(kind: Kind, ranks: tuple[int, ...]) -> float:
        return cluster.collective_ns(kind, large, ranks) / 1e9

    gathers = [seconds(Kind.ALL_GATHER, ranks) for ranks in ((0, 2), (0, 1, 2, 3))]
    assert gathers[0] / gathers[1] == pytest.approx(2, rel=0.01)
    exchanges = [seconds(Kind.ALL_TO_ALL, ranks) for ranks in ((0, 2), (0, 1, 2, 3))]
    assert exchanges[0] / exchanges[1] == pytest.approx(1, rel=0.01)
    reductions = [seconds(kind, (0, 1)) for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)]
    assert reductions[0] / reductions[1] == pytest.approx(2, rel=0.01)


def test_an_all_gather_that_fits_the_ports_is_bound_inside_the_hosts() -> None:
    """Eight ports together bring a tensor in faster than NVLink spreads it: the slower counts."""
    cluster = load_cluster("a800")
    both = [cluster.collective_ns(Kind.ALL_GATHER, 2**34, ranks) for ranks in (HOST, range(16))]
    assert both[1] == pytest.approx(both[0], rel=0.01)
