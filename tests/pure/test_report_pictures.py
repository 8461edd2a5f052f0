"""Merged short spans keep every colour's share, pictures have their size, terminal tables align."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_directory import make_comparison, make_timeline

from interlace.ir.graph import Kind
from interlace.ir.timeline import Span, Timeline
from interlace.report.plots import WIDTH_PX, plan_timeline_png
from interlace.report.short_spans import pieces
from interlace.report.tables import bench_table, collective_table, comparison_lines
from interlace.report.theme import ALL_FAMILIES, DARK, FAMILIES, ISSUE, LIGHT, family, tone
from interlace.text import milliseconds, number, size

_COLUMNS = 50


def _lane(lengths: list[tuple[str, int]]) -> list[tuple[Span, str]]:
    """Adjacent spans of (group, length); group `-` is idle time."""
    spans, now = [], 0
    for index, (group, length) in enumerate(lengths):
        if group != "-":
            spans.append((Span(f"op{index}", "matmul", "compute", now, now + length), group))
        now += length
    return spans


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab-"), st.integers(1, 400)), min_size=1, max_size=300))
def test_merging_keeps_shares_and_stays_bounded(lengths: list[tuple[str, int]]) -> None:
    """Whatever the lane: no picture of it has more pieces than columns + wide spans, pieces lie
    inside it, and of evenly mixed short spans each group keeps its share to a few columns."""
    spans = _lane(lengths)
    end_ns = sum(length for _, length in lengths)
    found = pieces(spans, start_ns=0, end_ns=end_ns, columns=_COLUMNS)
    whole = [piece for piece in found if piece.is_whole]
    assert len(found) - len(whole) <= _COLUMNS
    assert len(whole) <= _COLUMNS / 4
    for piece in found:
        assert 0 <= piece.start_ns < piece.end_ns <= end_ns * (1 + 1e-9)
    exact = {(s.start_ns, s.end_ns, group) for s, group in spans}
    assert all((piece.start_ns, piece.end_ns, piece.group) in exact for piece in whole)


@pytest.mark.parametrize("wait_ns", [1, 2, 4])
def test_small_waits_do_not_vanish(wait_ns: int) -> None:
    """Waits that take a tenth to four tenths of every sliver take that share of the picture.

    Showing the larger group of each column would show no wait at all.
    """
    spans = _lane([("compute", 10 - wait_ns), ("wait", wait_ns)] * 1000)
    found = pieces(spans, start_ns=0, end_ns=10_000, columns=400)
    shown = sum(piece.end_ns - piece.start_ns for piece in found if piece.group == "wait")
    assert shown / 10_000 == pytest.approx(wait_ns / 10, abs=0.01)


def test_window_cuts_spans() -> None:
    """A span that reaches over both ends of a window is drawn from end to end of it."""
    span = Span("long", "matmul", "compute", 0, 1000)
    (piece,) = pieces([(span, "a")], start_ns=300, end_ns=400, columns=10)
    assert (piece.start_ns, piece.end_ns, piece.is_whole) == (300, 400, True)


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_picture_has_its_width_and_grows_with_panels(tmp_path: Path) -> None:
    """2800 px wide; three panels are taller than one; labels may hold any characters."""
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    plan_timeline_png([make_timeline("2")], one, title="costs $5 and $6 & <b>")
    plan_timeline_png([make_timeline(mode) for mode in ("eager", "1", "2")], three)
    assert _png_size(one)[0] == _png_size(three)[0] == WIDTH_PX == 2800
    assert _png_size(three)[1] > _png_size(one)[1] > 400


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span("mm", "matmul", "compute", 0, 10),),
        (Span("mm", "matmul", "compute", 5, 5), Span("ag", "all_gather", "tensor", 0, 7)),
    ],
    ids=["empty", "no collective", "no duration"],
)
def test_unusual_timelines_are_drawn(tmp_path: Path, spans: tuple[Span, ...]) -> None:
    """No span, no collective, spans without length: a picture, not an error."""
    path = tmp_path / "odd.png"
    plan_timeline_png([Timeline("odd", 0, spans)], path)
    assert _png_size(path)[0] == WIDTH_PX


def test_every_kind_has_a_colour_in_both_themes() -> None:
    """All kinds of operators are in the legend, and the strands differ in tone."""
    assert set(FAMILIES) == set(Kind)
    span = Span("adamw", "optimizer", "compute", 0, 1)
    assert family(span) == FAMILIES[Kind.OTHER]
    assert family(Span("ag", "all_gather", "compute", 0, 1)) == ISSUE
    assert family(Span("ag", "all_gather", "tensor", 0, 1)) == "all-gather"
    for theme in (LIGHT, DARK):
        for name in ALL_FAMILIES:
            tones = {tone(name, strand, theme) for strand in ("forward", "backward", "")}
            assert len(tones) == 3


def test_collective_table_sums_to_the_timeline() -> None:
    """The last line holds the count, bytes and times of all collectives."""
    timeline = make_timeline("2", micro_batches=2)
    lines = collective_table(timeline).splitlines()
    assert lines[0].split()[:4] == ["collective", "lane", "count", "bytes"]
    total = lines[-1].split()
    assert total[0] == "all"
    assert int(total[1]) == len(timeline.collectives)
    assert f"{total[2]} {total[3]}" == size(sum(span.bytes for span in timeline.collectives))
    assert total[4] == milliseconds(timeline.communication_ns())
    assert total[6] == milliseconds(timeline.exposed_ns())
    assert collective_table(Timeline("none", 0, ())) == "no collectives were recorded"


def test_comparison_lines_say_what_was_measured_and_what_not() -> None:
    """Three step times, identity, hidden fraction and gains; absent parts are said to be absent."""
    timelines = {mode: make_timeline(mode) for mode in ("eager", "1", "2")}
    comparison = make_comparison(timelines)
    text = "\n".join(comparison_lines(comparison))
    for name in ("PyTorch eager", "one strand", "two strands, interlaced"):
        assert name in text
    assert "losses identical: yes" in text
    assert f"hidden fraction: {100 * timelines['2'].hidden_fraction():.1f} %" in text
    assert f"speed-up over PyTorch eager: {comparison['speedup_vs_eager']['median']:.2f}x" in text
    assert "losses identical: NO" in "\n".join(
        comparison_lines({**comparison, "losses_identical": False})
    )
    alone = make_comparison({"eager": timelines["eager"]})
    del alone["losses_identical"]
    text = "\n".join(comparison_lines(alone))
    assert "losses identical: not compared" in text
    assert "hidden fraction: not recorded" in text
    assert "speed-up" not in text
    for mode in comparison["modes"].values():
        mode["communication_ms"] = 0.0
    lines = comparison_lines(comparison)
    assert "hidden fraction: nothing to hide, a step has no communication" in lines
    assert not any("%" in line for line in lines)


def test_bench_table_aligns_rows() -> None:
    """One line per row under the header; missing numbers are dashes."""
    row = {"case": "1gbit", "metric": "speedup_vs_eager", "ours": 541.2, "baseline": 812.0}
    rows = [
        {**row, "ratio": 1.5, "spread": [1.44, 1.55]},
        {"case": "real", "metric": "hidden_fraction", "ours": 0.93}
        | {"baseline": None, "ratio": None, "spread": None},
    ]
    lines = bench_table(rows).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == [
        "1gbit",
        "speedup_vs_eager",
        "541",
        "812",
        "1.50",
        "1.44",
        "to",
        "1.55",
    ]
    assert lines[3].split() == ["real", "hidden_fraction", "0.93", "-", "-", "-"]
    assert bench_table([]) == "no rows"


@pytest.mark.parametrize(
    ("value", "text"), [(0.034, "0.03"), (4.25, "4.25"), (12.34, "12.3"), (1801.4, "1,801")]
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    """Small and large numbers are both readable."""
    assert number(value) == text
