"""`interlace bench reshard`: its cases are the paper's, its rows say what was measured."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from interlace.bench.reshard import link_rows, read_case, run_size
from interlace.bench.reshard_cases import (
    CHECKPOINT,
    FULL,
    FULL_EMULATED,
    FULL_TENSOR,
    METHODS,
    QUICK,
    QUICK_EMULATED,
    ReshardCase,
    ReshardSize,
    Side,
    from_json,
    to_json,
)
from interlace.bench.reshard_picture import bandwidth_png
from interlace.bench.reshard_rows import Measured, rows_of, summary_rows, tables
from interlace.bench.results import ResultRow
from interlace.lab.hosts import available

MIB = 2**20
CASE = next(case for case in FULL.cases if case.name == "case 7")
TIMES = {
    "send_recv": [8000.0, 8400.0, 8800.0],
    "local_all_gather": [2000.0, 2100.0, 2200.0],
    "broadcast": [1500.0, 1500.0, 1500.0],
    "load_balance": [1400.0, 1400.0, 1400.0],
    "search": [1200.0, 1200.0, 1200.0],
    "ours": [1000.0, 1050.0, 1100.0],
    FULL_TENSOR: [3000.0, 900.0, 3300.0],
    CHECKPOINT: [500.0, 600.0, 700.0],
}


def made_up(case: ReshardCase = CASE, **times: list[float]) -> Measured:
    """A NIC of 16 MiB/s, so that the 16 MiB of case 7 take 1000 ms."""
    return Measured(
        case=case,
        times_ms=TIMES | times,
        cpu_ms={name: [each / 2 for each in made] for name, made in (TIMES | times).items()},
        predicted_ms={method.name: 1000.0 for method in METHODS},
        lower_bound_ms=1000.0,
        nic_bytes_per_s=16 * MIB,
    )


def by_metric(rows: list[ResultRow]) -> dict[str, ResultRow]:
    return {row.metric: row for row in rows}


def test_the_full_size_has_the_papers_cases() -> None:
    """8 sets of receivers, 8 pairs of meshes on 5 hosts of 4 devices; every tile divides evenly
    (case 6 into 2 and 3), and the tensors are 16 MiB."""
    names = [case.name for case in FULL.cases]
    receivers = ("1,1", "1,2", "1,3", "1,4", "2,2", "3,2", "4,2", "3,4")
    assert names[:8] == [f"1 to ({each})" for each in receivers]
    assert names[8:] == [f"case {number}" for number in (1, 2, 3, 4, 5, 6, 7, 9)]
    for case in FULL.cases:
        assert case.tensor_bytes == pytest.approx(16 * MIB, rel=0.005)
        assert case.source.hosts + case.destination.hosts <= FULL.hosts
        for side in (case.source, case.destination):
            assert side.devices <= FULL.devices
            pieces = dict.fromkeys(range(len(case.shape)), 1)
            for count, dim in zip((side.hosts, side.devices), side.placements, strict=True):
                if dim is not None:
                    pieces[dim] *= count
            assert all(case.shape[dim] % count == 0 for dim, count in pieces.items())


@pytest.mark.parametrize(
    ("spec", "placements", "replicas"),
    [
        ("R R R", (None, None), 8),
        ("S0 R R", (0, None), 4),
        ("R S1 R", (None, 1), 2),
        ("R S01 R", (1, 1), 1),
        ("S1 R S0", (2, 0), 1),
    ],
)
def test_specs_of_the_paper_are_placements(
    spec: str, placements: tuple[int | None, int | None], replicas: int
) -> None:
    """S0 cuts over hosts, S1 over the devices of a host, S01 over both."""
    side = Side(hosts=2, devices=4, spec=spec)
    assert side.placements == placements
    assert side.replicas == replicas


@pytest.mark.parametrize("size", [FULL, QUICK, FULL_EMULATED, QUICK_EMULATED])
def test_a_size_survives_its_file(size: ReshardSize) -> None:
    """The processes of the world read what the bench wrote; an emulated host is one device."""
    assert from_json(to_json(size)) == size
    assert size.emulated == (size.devices == 1)
    assert size.cases


def test_rows_compare_ours_with_each_method_repeat_by_repeat() -> None:
    """Speed-ups are medians over pairs; the bound and the prediction compare with medians."""
    rows = by_metric(rows_of(made_up()))
    gain = rows["speedup_vs_send_recv"]
    assert gain.ratio == pytest.approx(8.0)
    assert gain.spread == pytest.approx((8.0, 8.0))
    assert (gain.ours, gain.baseline) == (1050.0, 8400.0)
    assert rows["speedup_vs_search"].ratio == pytest.approx(1200 / 1050)
    assert rows["over_lower_bound"].ratio == pytest.approx(1.05)
    assert rows["over_lower_bound"].spread == pytest.approx((1.0, 1.1))
    assert rows["over_lower_bound_send_recv"].ratio == pytest.approx(8.4)
    assert rows["predicted_over_measured"].ratio == pytest.approx(1 / 1.05)
    assert rows["predicted_over_measured_search"].ratio == pytest.approx(1 / 1.2)
    assert rows["cores_busy"].ratio == rows["cores_busy_full_tensor"].ratio == 0.5


def test_a_checkpoint_pays_for_the_nic() -> None:
    """From one source host 16 MiB are written and by each destination host 16 MiB read: 2000 ms
    more. The faster PyTorch way of each repeat counts; the bare RAM disk has a row of its own."""
    rows = by_metric(rows_of(made_up()))
    assert made_up().storage_ms == pytest.approx(2000.0)
    assert rows["speedup_vs_checkpoint_on_ram_disk"].baseline == 600.0
    assert rows["speedup_vs_checkpoint"].baseline == 2600.0
    assert rows["speedup_vs_pytorch"].baseline == 2500.0  # of 2500, 900, 2700
    assert rows["speedup_vs_pytorch"].ratio == pytest.approx(2700 / 1100)
    sharded = next(case for case in FULL.cases if case.name == "case 6")
    assert sharded.storage_bytes == (sharded.tensor_bytes / 2, sharded.tensor_bytes / 3)


def test_the_summary_is_the_worst_case() -> None:
    """Over the bound, and off the prediction."""
    slow = made_up(ours=[2000.0, 2000.0, 2000.0])
    rows = by_metric(summary_rows([made_up(), slow]))
    assert rows["worst_over_lower_bound"].ours == pytest.approx(2.0)
    assert rows["worst_over_lower_bound"].spread == pytest.approx((1.05, 2.0))
    assert rows["worst_prediction_error"].ours == pytest.approx(0.5)


def test_tables_and_picture_show_every_case() -> None:
    """One line per case in each of three tables; two panels as soon as both kinds are there."""
    one = made_up(FULL.cases[0])
    text = tables([one, made_up()])
    assert text.count("1 to (1,1)") == text.count("case 7") == 3
    assert "8.00x" in text
    assert all(len(line) <= 130 for line in text.splitlines())
    heights = []
    for cases in ([one], [one, made_up()]):
        image = imread(io.BytesIO(bandwidth_png(cases, "lab link 125mbit")))
        heights.append(image.shape[0])
    assert heights[1] > heights[0] > 500


def test_results_are_read_in_ms() -> None:
    """The processes write ns; the NIC's payload is compared with what its rate allows."""
    size = replace(FULL, cases=(CASE,))
    links = {"nic_bytes_per_s": 16.0 * MIB, "nic_measured_bytes_per_s": 8.0 * MIB}
    times_ns = {name: [time * 1e6 for time in times] for name, times in TIMES.items()}
    content = {
        "name": "case 7",
        "times_ns": times_ns,
        "cpu_ns": {name: [time / 2 for time in times] for name, times in times_ns.items()},
        "predicted_ns": {method.name: 1e9 for method in METHODS},
        "lower_bound_ns": 10**9,
    }
    assert read_case(size, {"links": links, "cases": [content]}, 0) == made_up()
    assert link_rows(links)[0].ratio == 0.5


def test_a_tiny_world_runs_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three processes move real tensors, by every method, to where they belong (each process
    checks its part); the result file has the rows, the picture lies beside it. In a lab where one
    can be made, else on emulated links."""
    side = Side(hosts=1, devices=1, spec="R R R")
    case = ReshardCase(
        name="case 0",
        shape=(4, 6, 8),
        source=side,
        destination=replace(side, hosts=2, spec="R S0 R"),
    )
    emulated = bool(available())
    size = ReshardSize(
        hosts=3, devices=1, rate="1gbit", cases=(case,), repeats=2, emulated=emulated
    )
    assert run_size(size, tmp_path / "reshard.json") == 0
    rows = json.loads((tmp_path / "reshard.json").read_text())["rows"]
    metrics = {row["metric"] for row in rows if row["case"] == "case 0"}
    wanted = {"over_lower_bound", "predicted_over_measured"}
    wanted |= {f"speedup_vs_{name}" for name in ("send_recv", "pytorch")}
    assert wanted <= metrics
    assert (tmp_path / "reshard.png").read_bytes().startswith(b"\x89PNG")
    assert "case 0" in capsys.readouterr().out
