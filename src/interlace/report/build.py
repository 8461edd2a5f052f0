"""`build_report`: from the folder of a run, or a cost file, to a page, pictures and a trace."""

from dataclasses import replace
from pathlib import Path

from interlace import run_files
from interlace.errors import InputError
from interlace.ir import store
from interlace.ir.costs import CostTable
from interlace.ir.timeline import Timeline
from interlace.report import chrome, findings, html
from interlace.report.heatmap import oef_png
from interlace.report.load import RunRecord, is_cost_folder, load_run
from interlace.report.pipeline_picture import pipeline_page_png
from interlace.report.plots import timeline_png
from interlace.report.tables import MODE_NAMES
from interlace.report.theme import LIGHT, Theme
from interlace.run_files import write_whole


def build_report(source: Path, output: Path | None = None) -> list[Path]:
    """Write the report of the folder of a run, or of a cost file; returns the files written, the
    page first.

    The page is `output`, or report.html in the folder, or that of the cost file with .html. If
    steps were recorded, timeline.png and trace.json.gz stand beside it, and pipeline.png if it was
    a pipeline; if pairs were measured, a heat map (names begin with the page's if `output` is
    given, or for a cost file). Raises
    InputError for a folder that holds no run or damaged files, RunError if writing fails.
    """
    if output is not None and output.is_dir():
        raise InputError(
            f"{output} is a folder", hint=f"name a file, such as {output / run_files.REPORT}"
        )
    if source.is_file() or is_cost_folder(source):
        return _cost_report(source if source.is_file() else source / run_files.COSTS, output)
    record = load_run(source)
    page = output or source / run_files.REPORT
    prefix = f"{output.stem}-" if output else ""
    picture = page.with_name(prefix + run_files.PICTURE)
    trace = page.with_name(prefix + run_files.TRACE)
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
    if record.pipeline is not None:
        stages = page.with_name(prefix + run_files.PIPELINE_PICTURE)
        write_whole(stages, pipeline_page_png(record.pipeline))
        written.append(stages)
    if record.costs and record.costs.pairs:
        heat_map = page.with_name(prefix + run_files.HEAT_MAP)
        write_whole(heat_map, oef_png(record.costs))
        written.append(heat_map)
    return written


def _cost_report(path: Path, output: Path | None) -> list[Path]:
    table = store.load(path, CostTable)
    page = output or path.with_suffix(".html")
    written = [page]
    write_whole(page, html.render_costs(table, path.name).encode())
    if table.pairs:
        written.append(page.with_name(f"{page.stem}-oef.png"))
        write_whole(written[-1], oef_png(table))
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
