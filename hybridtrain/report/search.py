"""The comparison page's section about a search: history, importance, and the winner's command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridtrain.report.charts import Series, can_draw, length_chart, line_chart
from hybridtrain.report.page import Part, code, figure, figures, heading, paragraph
from hybridtrain.util.option_types import is_number

SEARCH_FILE = "search.json"


def search_section(found: Mapping[str, Any], _: Path) -> Iterator[Part]:
    """The section about a search."""
    metric, trials = str(found["metric"]), list(found["trials"])
    states = [x["state"] for x in trials]
    counts = ", ".join(f"{states.count(x)} {x}" for x in dict.fromkeys(states))
    yield heading("Search")
    yield paragraph(f"{found['direction']} {metric}: {len(trials)} jobs, {counts}.")
    if found["command"]:
        yield paragraph(f"The best is job {found['best']}: ", code(found["command"]))
    if not can_draw():
        return
    drawn = []
    done = [x for x in trials if x["state"] == "complete" and is_number(x["value"])]
    if done:
        better = min if found["direction"] == "minimize" else max
        numbers, values = [x["number"] for x in done], [x["value"] for x in done]
        best = [better(values[: i + 1]) for i in range(len(values))]
        lines = [Series("job", numbers, values), Series("best so far", numbers, best)]
        chart = line_chart(lines, "job", metric, marks=True, fit_y=True)
        drawn.append(figure(chart, f"{metric} of each job, and the best so far"))
    if importance := found["importance"]:
        shares = [100 * x for x in importance.values()]
        chart = length_chart([x.lstrip("+") for x in importance], shares, "% of the variation")
        drawn.append(figure(chart, "How much each key matters (PED-ANOVA)"))
    yield figures(drawn)
