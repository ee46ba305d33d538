"""A preflight report as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from .rules import ERROR, WARNING

if TYPE_CHECKING:
    from . import Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 0; }
.error { color: #b00020; } .warning { color: #8a5a00; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #ddd; padding: .2rem .6rem .2rem 0; vertical-align: top; }
td:first-child { width: 40%; overflow-wrap: anywhere; }
"""


def html_page(report: Report) -> str:
    """The page; every text of the model in it is escaped."""
    title = "%s for %s" % (report.path, report.target)
    parts = [
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>",
        "<title>%s</title><style>%s</style>" % (escape(title), STYLE),
        "<h1>%s</h1>" % escape(title),
        "<p>Read by %s: %d errors, %d warnings.</p>"
        % (escape(report.reader), report.count(ERROR), report.count(WARNING)),
    ]
    for _, group in groupby(report.findings, lambda finding: finding.rule):
        found = list(group)
        first = found[0]
        parts.append(
            "<h2 id='%s'><span class='%s'>%s %s</span>: %s</h2><p>%s.</p><table>"
            % (
                first.rule,
                first.severity,
                first.rule,
                first.severity,
                escape(first.title),
                escape(first.remedy[:1].upper() + first.remedy[1:]),
            )
        )
        for finding in found:
            row = "<tr><td><code>%s</code></td><td>%s</td><td>%s</td></tr>"
            name = Path(finding.graph).name
            parts.append(row % (escape(finding.where), escape(finding.what), escape(name)))
        parts.append("</table>")
    return "\n".join([*parts, "</html>"])
