"""The report as one HTML page: style and pictures inside, no script, nothing fetched."""

import base64
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from interlace.ir.costs import CostTable
from interlace.report import cost_tables, findings
from interlace.report.charts import expert_load_svg, loss_svg, step_time_svg
from interlace.report.heatmap import oef_png
from interlace.report.load import RunRecord
from interlace.report.pipeline_picture import pipeline_page_png
from interlace.report.tables import (
    COLLECTIVE_HEADER,
    COMPARISON_HEADER,
    MODE_NAMES,
    PROOF_HEADER,
    collective_cells,
    comparison_rows,
    proof_cells,
)
from interlace.report.theme import DARK, LIGHT, Theme

Table = dict[str, Any]


def render(record: RunRecord, *, draw_timeline: Callable[[Theme], bytes], trace_name: str) -> str:
    """The page of a run. `draw_timeline` gives the PNG for a theme; called only if recorded."""
    timelines = record.first_ranks()
    unit = findings.loss_unit(record)
    comparison, stages = record.comparison, record.pipeline
    plan, plan_lines_left = findings.plan_excerpt(record.plan)
    train, held_out = findings.points(record, "step"), findings.points(record, "evaluate")
    return _template("report.html.jinja").render(
        themes={"light": LIGHT, "dark": DARK},
        directory=record.directory.resolve().name,
        headline=findings.headline(record),
        facts=findings.facts(record),
        link=record.link,
        step_time=_themed(lambda theme: step_time_svg(comparison["modes"], theme), "svg+xml")
        if comparison
        else None,
        comparison=_table(COMPARISON_HEADER, comparison_rows(comparison), 1)
        if comparison
        else None,
        difference=(comparison or {}).get("max_relative_difference_to_eager"),
        timeline=_themed(draw_timeline, "png") if timelines else None,
        trace_name=trace_name,
        pipeline=_themed(lambda theme: pipeline_page_png(stages, theme), "png") if stages else None,
        pipeline_summary=findings.pipeline_sentence(stages) if stages else "",
        modes=[_mode(mode, timeline) for mode, timeline in timelines.items()],
        proof=_table(PROOF_HEADER, proof_cells(proofs[-1]["rows"]), 2)
        if (proofs := [each for each in record.of("proof") if each["rows"]])
        else None,
        ranks=_table(findings.RANK_HEADER, findings.rank_rows(record), 1),
        without_partner=findings.without_partner(timelines["2"]) if "2" in timelines else "",
        loss=_themed(lambda theme: loss_svg(train, held_out, unit, theme), "svg+xml")
        if train or held_out
        else None,
        experts=_experts(record),
        truncated=bool(record.of("truncated")),
        plan=plan if record.plan else None,
        plan_lines_left=plan_lines_left,
        costs=_costs(record.costs) if record.costs else None,
        environment=findings.flat(record.environment),
        config=findings.flat(record.config),
    )


def _experts(record: RunRecord) -> dict[str, Any] | None:
    """The load of experts over steps; None of a model without any."""
    steps = [event for event in record.of("step") if event.get("expert_load")]
    if not steps:
        return None
    loads = [(event["step"], event["expert_load"]) for event in steps]
    return {
        "picture": _themed(lambda theme: expert_load_svg(loads, theme), "svg+xml"),
        "summary": findings.expert_sentence(steps),
    }


def render_costs(table: CostTable, name: str) -> str:
    """The page of a cost file alone."""
    return _template("costs.html.jinja").render(
        themes={"light": LIGHT, "dark": DARK},
        name=name,
        source=table.source,
        graph=table.graph_digest,
        machine=table.machine,
        headline=cost_tables.headline(table),
        costs=_costs(table),
    )


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("interlace.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _costs(table: CostTable) -> dict[str, Any]:
    """The tables of a cost file, and its heat map if anything was measured together."""
    pairs = [cost_tables.oef_rows(table, factors=factors) for factors in (False, True)]
    return {
        "headline": cost_tables.headline(table),
        "warning": cost_tables.warning(table),
        "heat_map": _themed(lambda theme: oef_png(table, theme=theme), "png")
        if table.pairs
        else None,
        "oef": _table(*pairs[0], 1) if table.pairs else None,
        "factors": _table(*pairs[1], 1) if table.pairs else None,
        "fits": _table(cost_tables.FIT_HEADER, cost_tables.fit_rows(table), 2),
        "together": _table(cost_tables.TOGETHER_HEADER, cost_tables.together_rows(table), 1),
        "operators": _table(cost_tables.OPERATOR_HEADER, cost_tables.operator_rows(table), 3),
    }


def _mode(mode: str, timeline: Any) -> dict[str, Any]:
    """The tables of one recorded mode."""
    has_collectives = bool(timeline.collectives)
    cells = collective_cells(timeline) if has_collectives else []
    return {
        "name": MODE_NAMES.get(mode, mode),
        "rank": timeline.rank,
        "collectives": _table(COLLECTIVE_HEADER, cells, 2) if has_collectives else None,
        "waits": _table(findings.WAIT_HEADER, findings.longest_waits(timeline), 3),
        "estimated": sum(not span.end_known for span in timeline.collectives),
        "count": len(timeline.collectives),
    }


def _table(header: Any, rows: Any, text_columns: int) -> Table:
    return {"header": header, "rows": rows, "text_columns": text_columns}


def _themed(draw: Callable[[Theme], bytes], kind: str) -> dict[str, str]:
    """A picture for each theme, as data URIs."""
    return {
        name: f"data:image/{kind};base64,{base64.b64encode(draw(theme)).decode()}"
        for name, theme in (("light", LIGHT), ("dark", DARK))
    }
