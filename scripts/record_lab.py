"""Gather what our benches predicted of their own steps into `presets/measured/lab.csv`.

    python scripts/record_lab.py

reads every file of `bench/results` and takes its rows of `predicted_over_measured`, for `interlace
bench simulator` to show. Run it after a bench was run for the record.
"""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.bench.simulator_lab import FIELDS, TABLE

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
METRIC = "predicted_over_measured"


def lab_csv() -> str:
    """The text of the table: by machine, then by bench, then as the bench wrote them."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    for path in sorted(RESULTS.glob("*/*.json")):
        writer.writerows(_rows(json.loads(path.read_text(encoding="utf-8"))))
    return out.getvalue()


def _rows(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    about = found.get("environment", {})
    machine = about.get("gpu", "none")
    machine = about.get("processor", "") if machine == "none" else machine
    for row in found["rows"]:
        metric = row.get("metric", "")
        if metric == METRIC or metric.startswith(f"{METRIC}_"):
            yield {
                "bench": found["bench"],
                "case": row["case"],
                "way": metric.removeprefix(METRIC).removeprefix("_"),
                METRIC: f"{row['ratio']:.4f}",
                "machine": machine,
                "torch": about["torch"],
                "date": about["date"],
            }


if __name__ == "__main__":
    TABLE.write_text(lab_csv(), encoding="utf-8")
    print(TABLE)
