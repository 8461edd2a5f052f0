"""The report is complete, self-contained and safe to open, and its numbers are the timeline's."""

import gzip
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from run_directory import ISSUE_NS, LINK, make_comparison, make_timeline, write_run

from interlace.errors import InputError, RunError
from interlace.ir.timeline import Timeline
from interlace.report.build import build_report
from interlace.report.tables import MODE_NAMES, collective_cells
from interlace.text import milliseconds

_VOID = {"meta", "img", "source", "br", "link", "hr"}


class _Page(HTMLParser):
    """Checks that elements nest, and collects texts, table rows and references."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = {"src", "srcset", "href", "action", "data", "poster"}
        self.references += [value or "" for name, value in attrs if name in names]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag == "tr":
            self.rows.append([])
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Timeline], _Page]:
    """A complete run, its timelines by mode, and its page."""
    directory = tmp_path_factory.mktemp("run")
    timelines = write_run(directory, text="<script>alert(1)</script>")
    written = build_report(directory)
    names = ["report.html", "timeline.png", "trace.json.gz"]
    assert written == [directory / name for name in names]
    return directory, timelines, _Page(written[0].read_text(encoding="utf-8"))


def test_page_fetches_nothing_and_runs_nothing(run: tuple) -> None:
    """Pictures are inside; the one link is the trace beside the page; text stays text."""
    directory, _, page = run
    html = (directory / "report.html").read_text()
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", html)
    outside = [ref for ref in page.references if not ref.startswith("data:image/")]
    assert outside == ["trace.json.gz"]
    assert sum(ref.startswith("data:image/") for ref in page.references) == 6


def test_headline_states_gain_and_identity(run: tuple) -> None:
    """The first sentence gives the measured median ratio and whether losses are the same."""
    _, timelines, page = run
    ratio = make_comparison(timelines)["speedup_vs_eager"]["median"]
    assert ratio > 1.1
    assert (
        f"A step is {ratio:.2f} times faster with two strands than with PyTorch eager" in page.text
    )
    assert "losses are identical to one strand, bit for bit" in page.text
    assert LINK in page.text


def test_tables_hold_the_numbers_of_the_timelines(run: tuple) -> None:
    """Collectives per mode, and every rank's totals, equal what the timeline computes."""
    _, timelines, page = run
    for mode, timeline in timelines.items():
        rows = timeline.collective_rows()
        assert {row.kind for row in rows} == {"all_gather", "reduce_scatter"}
        for cells in collective_cells(timeline):
            assert [cell for cell in cells if cell] in page.rows
        issuing = ISSUE_NS * len(timeline.collectives)
        totals = (timeline.length_ns, timeline.communication_ns(), issuing, timeline.exposed_ns())
        hidden = f"{100 * timeline.hidden_fraction():.1f} %"
        for rank in "01":
            assert [MODE_NAMES[mode], rank, *map(milliseconds, totals), hidden] in page.rows


def test_longest_waits_are_ranked_by_exposed_time(run: tuple) -> None:
    """The first table of waits is two strands'; its first row is the largest sum of waits."""
    _, timelines, page = run
    sums: dict[tuple[str, str], int] = {}
    for span in timelines["2"].spans:
        if span.kind == "wait":
            key = (span.name, span.strand)
            sums[key] = sums.get(key, 0) + span.duration_ns
    (name, strand), total = max(sums.items(), key=lambda item: item[1])
    header = next(i for i, row in enumerate(page.rows) if row and row[0] == "operator")
    first = page.rows[header + 1]
    assert first[:2] == [name, strand]
    assert first[4] == milliseconds(total)
    exposed = [float(row[4]) for row in page.rows[header + 1 : header + 11]]
    assert exposed == sorted(exposed, reverse=True)


def test_environment_configuration_and_plan_are_shown(run: tuple) -> None:
    """What is needed to repeat the run is on the page."""
    _, _, page = run
    assert ["torch", "2.13.0+cpu"] in page.rows
    assert ["train.steps", "150"] in page.rows
    assert ["data.path", "<script>alert(1)</script>"] in page.rows
    assert "backward.all_gather_1" in page.text


def test_trace_has_ordered_events_of_every_mode_and_rank(run: tuple) -> None:
    """Complete events of a thread are in order and do not overlap; arrows reach their waits."""
    directory, timelines, _ = run
    trace = json.loads(gzip.decompress((directory / "trace.json.gz").read_bytes()))
    events = trace["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{MODE_NAMES[mode]}, rank {rank}" for mode in timelines for rank in (0, 1)]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in (e for e in events if e["ph"] == "X"):
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        threads.setdefault((event["pid"], event["tid"]), []).append((start, end))
    assert len(threads) == 2 * 2 * len(timelines)
    for spans in threads.values():
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    total = sum(len(spans) for spans in threads.values())
    assert total == 2 * sum(len(timeline.spans) for timeline in timelines.values())
    collective = next(e for e in events if e.get("args", {}).get("bytes"))
    assert collective["args"]["bytes"] == 65_536
    assert {"strand", "micro_batch", "issue_us", "queued_us"} <= set(collective["args"])
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == finishes.keys()
    waits = sum(e["ph"] == "X" and e["args"]["kind"] == "wait" for e in events)
    assert len(starts) == waits
    assert all(starts[key]["ts"] <= finishes[key]["ts"] for key in starts)


def test_missing_parts_say_how_to_record_them(tmp_path: Path) -> None:
    """A run directory with run.toml alone gives a page on which no section has vanished."""
    (tmp_path / "run.toml").write_text("strands = '1'\n")
    assert build_report(tmp_path) == [tmp_path / "report.html"]
    page = _Page((tmp_path / "report.html").read_text())
    for name in ("Step time", "One step", "Collectives", "What was not hidden", "Loss", "Plan"):
        assert name in page.text
    assert page.text.count("Not recorded.") == 7
    assert "--compare.steps 10" in page.text
    assert not (tmp_path / "timeline.png").exists()


def test_single_mode_and_unknown_losses(tmp_path: Path) -> None:
    """One mode alone, losses that are not numbers and a half-written last line are reported."""
    write_run(tmp_path, modes=("1",), ranks=1, steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 4, "bits_per_byte": "NaN"}\n{"event": "st')
    build_report(tmp_path)
    page = _Page((tmp_path / "report.html").read_text())
    assert "Two strands were not compared with another way of running" in page.text
    assert "The last line of metrics.jsonl has no end" in page.text


def test_the_plan_against_what_was_measured(tmp_path: Path) -> None:
    """The last table of expected and measured communication stands on the page."""
    write_run(tmp_path, modes=("2",), ranks=1, steps=3)
    row = {
        "kind": "all_gather", "lane": "tp", "count": 80, "expected_busy_ms": 333.9,
        "measured_busy_ms": 564.7, "expected_exposed_ms": 84.7, "measured_exposed_ms": 84.2,
    }  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "proof", "unix_time_s": 1.0, "rows": [row]}) + "\n")
    build_report(tmp_path)
    page = _Page((tmp_path / "report.html").read_text())
    assert "Expected by the plan, and measured" in page.text
    for cell in ("334", "565", "84.7", "84.2"):
        assert cell in page.text


def test_run_on_token_ids_is_shown_in_bits_per_token(tmp_path: Path) -> None:
    """Where no event knows bits per byte, losses are drawn and named in bits per token."""
    write_run(tmp_path, modes=("1",), ranks=1, steps=50)
    path = tmp_path / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if "bits_per_byte" in event:
            event["bits_per_byte"] = None
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    (evaluated,) = [event for event in events if event["event"] == "evaluate"]
    build_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "held-out bits per token" in text
    assert f"{evaluated['loss'] / math.log(2):.3f}" in text
    assert "bits per byte" not in text
    assert "Loss of training batches" in text


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [(0.8, 0.9, "1.18 times slower"), (0.9, 1.2, "equally long"), (1.3, 1.5, "times faster")],
)
def test_headline_does_not_flatter(tmp_path: Path, low: float, high: float, says: str) -> None:
    """A loss is called a loss, and a gain within the spread is called none."""
    write_run(tmp_path, ranks=1, steps=2)
    path = tmp_path / "comparison.json"
    comparison = json.loads(path.read_text())
    middle = (low + high) / 2
    comparison["speedup_vs_eager"] = {"median": middle, "min": low, "max": high}
    comparison["losses_identical"] = False
    path.write_text(json.dumps(comparison))
    build_report(tmp_path)
    text = _Page((tmp_path / "report.html").read_text()).text
    assert says in text
    assert "losses DIFFER from one strand" in text


def test_output_elsewhere_leaves_the_run_alone(tmp_path: Path) -> None:
    """With an output file, picture and trace carry its name and the link on the page fits."""
    write_run(tmp_path / "run", ranks=1, steps=2)
    before = sorted((tmp_path / "run").rglob("*"))
    page = tmp_path / "new" / "a.html"
    assert build_report(tmp_path / "run", page) == [
        page,
        page.with_name("a-timeline.png"),
        page.with_name("a-trace.json.gz"),
    ]
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert "a-trace.json.gz" in _Page(page.read_text()).references


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("metrics.jsonl", "{\n", "line 1"),
        ("metrics.jsonl", '{"event": "step", "step": 1, "loss": "x"}\n', "'x' is not a number"),
        ("metrics.jsonl", '{"event": "step", "loss": 1.0}\n', "has no step"),
        ("comparison.json", "{", "is not JSON"),
        ("comparison.json", "[]", "does not hold a JSON object"),
        ("comparison.json", '{"steps": 1}', "micro_batches"),
        (
            "comparison.json",
            '{"steps": 1, "micro_batches": 8, "link": "", "modes": {"2": {"step_ms": []}}}',
            "modes.2 must hold step_ms",
        ),
        ("environment.json", "{,}", "is not JSON"),
        ("run.toml", "a = ", "is not TOML"),
        ("plan.txt", "\udcff", "cannot read"),
        ("timelines/2-rank0.json", '{"label": "2"}', "is not a valid Timeline"),
        ("timelines/2-rank0.json", "", "JSON"),
        ("timelines/notes.json", "{}", "is not named"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    """Each damaged file is an InputError with its path, and no report appears."""
    write_run(tmp_path, ranks=1, steps=2)
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as caught:
        build_report(tmp_path)
    assert str(tmp_path / name) in caught.value.message
    assert complaint in caught.value.message
    assert not (tmp_path / "report.html").exists()


def test_span_that_ends_before_it_starts_is_refused(tmp_path: Path) -> None:
    """A timeline with impossible times is damaged, even if its JSON has the right shape."""
    write_run(tmp_path, modes=("2",), ranks=1, steps=2)
    path = tmp_path / "timelines" / "2-rank0.json"
    data = json.loads(path.read_text())
    data["spans"][0]["end_ns"] = -5
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="to -5 ns"):
        build_report(tmp_path)


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    """A missing folder, an empty one, and a folder given as output are told apart."""
    with pytest.raises(InputError, match="there is no folder"):
        build_report(tmp_path / "absent")
    with pytest.raises(InputError, match="is not the folder of a run"):
        build_report(tmp_path)
    with pytest.raises(InputError, match="is a folder"):
        build_report(tmp_path, tmp_path)


def test_unwritable_output(tmp_path: Path) -> None:
    """A disk that refuses is a RunError with the path."""
    (tmp_path / "run.toml").write_text("strands = '1'\n")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write"):
        build_report(tmp_path, tmp_path / "file" / "report.html")


def test_ten_thousand_spans_stay_small(tmp_path: Path) -> None:
    """A long step's page grows with its pictures' width, not with its number of spans."""

    def long_timeline(mode: str, *, rank: int) -> Timeline:
        return make_timeline(mode, rank=rank, layers=40)

    timelines = write_run(tmp_path, modes=("2",), ranks=1, timeline=long_timeline, steps=2)
    assert len(timelines["2"].spans) > 10_000
    page, picture, _ = build_report(tmp_path)
    assert picture.stat().st_size < 1_000_000
    assert page.stat().st_size < 3_000_000
