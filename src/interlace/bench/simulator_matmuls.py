"""Rows of `simulator` for single operators: published matmuls against `hardware.operator_times`."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import interlace.presets
from interlace.hardware.cluster import load_cluster
from interlace.hardware.operator_times import matmul_s

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
