"""Drill: a cluster from one file of the user's own; a resharding is planned for it."""

from pathlib import Path

import pytest

from interlace.errors import InputError
from interlace.hardware.cluster import load_cluster
from interlace.hardware.topology import cluster_topology
from interlace.ir.graph import Kind
from interlace.reshard.planning.layout import Layout
from interlace.reshard.planning.make_plan import make_plan
from interlace.reshard.planning.transfer_plan import TensorSpec, TransferPlan

FILE = Path(__file__).with_name("own_cluster.toml")
PORT_BYTES_PER_S = 50e9 / 8 * 0.8
ROWS, COLUMNS = 8192, 1024


def moved(file: Path) -> TransferPlan:
    """A float32 matrix split by rows over one box, to the other box, split by rows as well."""
    cluster = load_cluster(str(file))
    source, destination = (
        Layout(shape=(ROWS, COLUMNS), ranks=ranks, mesh_shape=(2,), placements=("S(0)",))
        for ranks in ((0, 1), (2, 3))
    )
    spec = TensorSpec(
        name="weight", shape=(ROWS, COLUMNS), itemsize=4, source=source, destination=destination
    )
    return make_plan([spec], cluster_topology(cluster, range(4)))


def test_a_move_takes_what_the_rates_of_the_file_say() -> None:
    """Each card sends half of the matrix through its share of the port."""
    plan = moved(FILE)
    assert plan.topology.hosts == ((0, 1), (2, 3))
    wire_ns = ROWS * COLUMNS * 4 / 2 / PORT_BYTES_PER_S * 1e9
    assert wire_ns <= plan.lower_bound_ns <= 1.01 * wire_ns
    assert plan.lower_bound_ns <= plan.predicted_ns <= 1.05 * wire_ns


def test_other_rates_give_other_times(tmp_path: Path) -> None:
    """Twice the rate of the ports, half the time."""
    faster = tmp_path / "faster.toml"
    text = FILE.read_text()
    assert "gbit_per_s = 50 " in text
    faster.write_text(text.replace("gbit_per_s = 50 ", "gbit_per_s = 100 "))
    assert moved(faster).lower_bound_ns == pytest.approx(moved(FILE).lower_bound_ns / 2, rel=0.01)


def test_collectives_follow_from_the_file() -> None:
    """Inside a box by its PCIe, between boxes by its ports (latency and bytes on the wire)."""
    cluster, size = load_cluster(str(FILE)), 2**28
    inside = cluster.collective_ns(Kind.ALL_GATHER, size, [0, 1])
    across = cluster.collective_ns(Kind.ALL_GATHER, size, [0, 2])
    assert inside == pytest.approx(size / 2 / (32e9 * 0.75) * 1e9 + 8.4e3 + 5e3, rel=1e-6)
    assert across == pytest.approx(size / 2 / PORT_BYTES_PER_S * 1e9 + 8.4e3 + 20e3, rel=1e-6)


def test_wrong_names_are_refused() -> None:
    """A file that is not there, and a preset that is none."""
    with pytest.raises(InputError, match=r"no cluster file own_clusters\.toml"):
        load_cluster("own_clusters.toml")
    with pytest.raises(InputError, match="there is no cluster 'workshop'") as caught:
        load_cluster("workshop")
    assert "a800" in caught.value.hint
