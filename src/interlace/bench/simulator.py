"""Published training steps against the step model of `interlace.hardware`, by source.

Computes the step of every row of `presets/measured/training.csv` that the model describes,
simulates those that only `interlace.strategy` does, with all of `recipes.csv`, and says which
neither does. Then two numbers for each source, a factor on the rates of its devices and the host's
time per operator, are fitted to every third row that the model describes and held against the
others. Needs no GPU and no second process; takes a minute. Single matmuls are held against measured
ones as well, and published factors of two strands over one and a layer with decomposed collectives
against `interlace.strategy`. What other simulators said of the same rows stands beside ours, as it
was recorded, and so does what our own benches predicted of the steps that they ran.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import interlace.presets
from interlace.bench.results import ResultRow, environment, write_json
from interlace.bench.simulator_decomposed import HEADER as DECOMPOSED_HEADER
from interlace.bench.simulator_decomposed import (
    decomposed_rows,
    decomposed_scores,
    decomposed_table,
)
from interlace.bench.simulator_lab import HEADER as LAB_HEADER
from interlace.bench.simulator_lab import lab_rows, lab_scores, lab_table
from interlace.bench.simulator_peers import (
    PeerScore,
    RowsScore,
    peer_rows,
    peer_scores,
    recorded_on,
)
from interlace.bench.simulator_rows import measured_rows
from interlace.bench.simulator_scores import SourceScore, score_source
from interlace.bench.simulator_strands import (
    HEADER,
    NEAR,
    factor_error,
    strand_rows,
    strand_scores,
    strand_table,
    within,
)
from interlace.hardware.cluster import load_cluster
from interlace.hardware.operator_times import matmul_s
from interlace.text import aligned

DEVICES = {"A100-PCIe-80G": ("a100-80", 0.78), "B200-SXM": ("b200", 0.5)}
"""By GPU of the table: the cluster whose device it has, and the share of the peak that was fitted
to these rows. An A100 of the PCIe form runs at a lower clock than that of the cluster."""


@dataclass(frozen=True, kw_only=True)
class MatmulScore:
    """Matmuls of one GPU."""

    gpu: str
    rows: int
    error: float
    """Mean of |computed / measured seconds - 1|."""
    worst: float


def matmul_scores() -> list[MatmulScore]:
    """One for each GPU of `presets/measured/matmuls.csv`."""
    errors: dict[str, list[float]] = {gpu: [] for gpu in DEVICES}
    devices = {}
    for gpu, (cluster, share) in DEVICES.items():
        device = load_cluster(cluster).device
        devices[gpu] = replace(device, reached=replace(device.reached, matmul=share))
    path = Path(interlace.presets.__path__[0]) / "measured" / "matmuls.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            shape = int(row["rows"]), int(row["columns"]), int(row["depth"])
            work = 2.0 * shape[0] * shape[1] * shape[2]
            measured_s = work / (float(row["peak_tflops"]) * 1e12 * float(row["efficiency"]))
            errors[row["gpu"]].append(abs(matmul_s(devices[row["gpu"]], *shape) / measured_s - 1))
    return [
        MatmulScore(gpu=gpu, rows=len(found), error=mean(found), worst=max(found))
        for gpu, found in errors.items()
    ]


_HEADER = (
    "source",
    "rows",
    "left out",
    "error",
    "bias",
    "held out",
    "fitted",
    "speed",
    "launch us",
    "rank",
    "memory",
)


def run(*, quick: bool, json_path: Path | None) -> int:
    """Score all sources, print the tables, write JSON if asked. `quick` simulates every fourth of
    NeMo's steps and of the rows with two strands; all others take seconds."""
    every = 4 if quick else 1
    sources = list(measured_rows(every).values())
    scores = [score for rows in sources if (score := score_source(rows)) is not None]
    peers = {rows.name: peer_scores(rows) for rows in sources}
    table = [line for score in scores for line in _lines(score, peers[score.name])]
    print(aligned(_HEADER, table, text_columns=1))
    print("\nerror, bias, rank (Spearman): all rows, nothing fitted")
    print("held out, fitted: the two thirds that the fit did not see, before and after it")
    print("memory: error of the peak of a rank, where it is known")
    print(f"indented: other simulators, recorded ({recorded_on()}; not run here), with one factor")
    print("  on all of their times fitted; `same rows` is ours on theirs, fitted in the same way")
    print("\nleft out:")
    for rows in sources:
        for reason, count in rows.left_out.items():
            print(f"  {rows.name}: {count} rows, {reason}")
    matmuls = matmul_scores()
    print("\nmatmuls, by the share of the peak that was fitted to them:")
    for each in matmuls:
        print(f"  {each.gpu}: {each.rows} shapes, error {each.error:.1%}, worst {each.worst:.0%}")
    strands = strand_scores(every)
    print("\nDHelix on 64 devices (arXiv 2411.15871):")
    print(aligned(HEADER, strand_table(strands), text_columns=1))
    print(f"factor_error {factor_error(strands):.1f} points, within {NEAR:.0f} points: ", end="")
    print(f"{within(strands)} of {len(strands)}")
    decomposed = decomposed_scores()
    print("\nCommFuse (arXiv 2604.24013, table 1), from its compute and its whole sum:")
    print(aligned(DECOMPOSED_HEADER, decomposed_table(decomposed), text_columns=1))
    lab = lab_scores()
    print("\nour own benches: steps predicted from times measured just before, as recorded:")
    print(aligned(LAB_HEADER, lab_table(lab), text_columns=1))
    if json_path is not None:
        result = [row for score in scores for row in result_rows(score)]
        result += peer_rows([each for found in peers.values() for each in found])
        result += [matmul_row(each) for each in matmuls]
        result += strand_rows(strands) + decomposed_rows(decomposed) + lab_rows(lab)
        write_json(json_path, "simulator", environment("no link: computed"), result)
        print(json_path)
    return 0


def result_rows(score: SourceScore) -> list[ResultRow]:
    """The score in the form of all benches: the model is ours, a perfect one the baseline, but for
    held-out rows, whose baseline is the model before the fit."""

    def row(metric: str, ours: float, baseline: float, ratio: float | None = None) -> ResultRow:
        return ResultRow(
            case=score.name,
            metric=metric,
            ours=ours,
            baseline=baseline,
            ratio=ratio,
            spread=None,
        )

    found = [
        row("rows_used", score.rows, score.rows + sum(score.left_out.values())),
        row("mean_error", score.before, 0.0),
        row("bias", score.bias, 0.0),
    ]
    if score.after is not None and score.unfitted is not None:
        found.append(
            row("held_out_error", score.after, score.unfitted, score.unfitted / score.after)
        )
    if score.speed is not None and score.launch_us is not None:
        found += [
            row("fitted_speed", score.speed, 1.0),
            row("fitted_launch_us", score.launch_us, 6),
        ]
    if score.rank_correlation is not None:
        found.append(row("rank_correlation", score.rank_correlation, 1.0))
    if score.memory_error is not None:
        found.append(row("memory_error", score.memory_error, 0.0))
    return found


def matmul_row(score: MatmulScore) -> ResultRow:
    """The same of matmuls."""
    case = f"matmuls, {score.gpu}"
    return ResultRow(
        case=case, metric="mean_error", ours=score.error, baseline=0.0, ratio=None, spread=None
    )


def _lines(score: SourceScore, peers: list[PeerScore]) -> list[tuple[str, ...]]:
    """A source as lines of the table, with those of its peers."""
    found = [_cells(score)]
    for each in peers:
        found.append(_peer_cells(f"  {each.peer}", each.theirs, score.rows))
        found.append(_peer_cells("  same rows", each.ours, score.rows))
    return found


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _peer_cells(name: str, score: RowsScore, rows: int) -> tuple[str, ...]:
    return (
        name,
        str(score.rows),
        str(rows - score.rows),
        _share(score.error),
        _share(score.bias),
        _share(score.held_out),
        _share(score.fitted),
        _plain(score.speed, 2),
        "-",
        _plain(score.rank_correlation, 2),
        _share(score.memory_error),
    )


def _cells(score: SourceScore) -> tuple[str, ...]:
    return (
        score.name,
        str(score.rows),
        str(sum(score.left_out.values())),
        _share(score.before),
        _share(score.bias),
        _share(score.unfitted),
        _share(score.after),
        _plain(score.speed, 2),
        _plain(score.launch_us, 0),
        _plain(score.rank_correlation, 2),
        _share(score.memory_error),
    )
