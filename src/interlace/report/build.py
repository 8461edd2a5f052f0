"""`build_report`: from the folder of a run to a page, a picture and a trace."""

from dataclasses import replace
from pathlib import Path

from interlace.errors import InputError
from interlace.ir.timeline import Timeline
from interlace.report import chrome, findings, html
from interlace.report.files import write_whole
from interlace.report.load import RunRecord, load_run
from interlace.report.plots import timeline_png
from interlace.report.tables import MODE_NAMES
from interlace.report.theme import LIGHT, Theme


def build_report(directory: Path, output: Path | None = None) -> list[Path]:
    """Write the report of the run in `directory`; returns the files written, the page first.

    The page is `output`, or report.html in `directory`. If steps were recorded, timeline.png and
    trace.json.gz stand beside it (with the page's name before theirs if `output` is given).
    Raises InputError for a folder that holds no run or damaged files, RunError if writing fails.
    """
    if output is not None and output.is_dir():
        raise InputError(
            f"{output} is a folder", hint=f"name a file, such as {output / 'report.html'}"
        )
    record = load_run(directory)
    page = output or directory / "report.html"
    prefix = f"{output.stem}-" if output else ""
    picture = page.with_name(prefix + "timeline.png")
    trace = page.with_name(prefix + "trace.json.gz")
    drawn: dict[Theme, bytes] = {}

    def draw(theme: Theme) -> bytes:
        if theme not in drawn:
            drawn[theme] = _picture(record, theme)
        return drawn[theme]

    text = html.render(record, draw_timeline=draw, trace_name=trace.name)
    written = [page]
    write_whole(page, text.encode())
    if record.timelines:
        write_whole(picture, draw(LIGHT))
        write_whole(trace, chrome.trace_gz(record.timelines))
        written += [picture, trace]
    return written


def _picture(record: RunRecord, theme: Theme) -> bytes:
    timelines: list[Timeline] = [
        replace(timeline, label=MODE_NAMES.get(mode, mode))
        for mode, timeline in record.first_ranks().items()
    ]
    world = record.environment.get("world_size")
    count = max((span.micro_batch for t in timelines for span in t.spans), default=0)
    rank = f"rank {timelines[0].rank}" + (f" of {world}" if world else "")
    notes = [f"one recorded step of {rank}", record.link]
    notes += [f"{count} micro-batches"] if count else []
    title = "One training step"
    if record.comparison:
        title = findings.gain_sentence(record)
        notes[0] = f"median of {record.comparison['steps']} timed steps; below {notes[0]}"
    return timeline_png(
        timelines, title=title, subtitle=", ".join(note for note in notes if note), theme=theme
    )
