"""Ask HolisticTraceAnalysis how much communication the traces of the tests hide: drawn ones, two
of HTA's own tests (tests/pure/hta_traces), and what `interlace explain --kineto` writes.

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0 'pandas<3' cattrs
    PYTHONPATH=src:tests/pure HTA_DISABLE_NS_ROUNDING=1 hta/bin/python scripts/ask_hta.py

It writes tests/pure/hta_answers.json, to which tests/pure/test_explain_hta.py holds `interlace
explain`. It is no dependency of the tests because it needs jupyterlab, over a hundred packages, and
does not work with pandas 3. The variable keeps it from rounding times to microseconds.
"""

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path

from kineto_traces import digest_of, random_trace, recorded_step

from interlace.explain.kineto_writer import write_kineto
from interlace.explain.run_trace import RecordedRun

PURE = Path(__file__).parents[1] / "tests" / "pure"
ANSWERS, REAL = PURE / "hta_answers.json", PURE / "hta_traces"
SEEDS = range(24)
"""Traces of whole microseconds from even seeds, with nanoseconds from odd ones."""


def overlap(path: Path) -> float:
    """Per cent of the communication that is under compute, two decimals."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="/")
    table = analysis.get_comm_comp_overlap(visualize=False)
    return float(table["comp_comm_overlap_pctg"].iloc[0])


def main() -> None:
    """Make the traces, ask, and write the answers."""
    if os.environ.get("HTA_DISABLE_NS_ROUNDING") != "1":
        raise SystemExit("set HTA_DISABLE_NS_ROUNDING=1")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drawn = {
            str(seed): overlap(
                random_trace(seed, whole=not seed % 2).write(folder / f"{seed}.json")
            )
            for seed in SEEDS
        }
        timelines = {mode: {0: recorded_step(mode)} for mode in ("1", "2")}
        run = RecordedRun(folder, timelines, {"tp": 2}, {})
        written = write_kineto(run, folder / "ours")
        ours = {path.parent.name: overlap(path) for path in written}
        digests = {path.parent.name: digest_of(path) for path in written}
    answers = {
        "version": "0.5.0",
        "drawn": drawn,
        "real": {path.name: overlap(path) for path in sorted(REAL.glob("*.json.gz"))},
        "recorded": ours,
        "digests of recorded": digests,
    }
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
