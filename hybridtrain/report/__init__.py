"""Self-contained pages: figures, tables and text in one file, for a phone and without a network."""

from hybridtrain.report.charts import Series, bar_chart, line_chart, picture
from hybridtrain.report.page import figure, heading, page, paragraph, table, write

__all__ = [
    "Series",
    "bar_chart",
    "figure",
    "heading",
    "line_chart",
    "page",
    "paragraph",
    "picture",
    "table",
    "write",
]
