"""The HTML report of a run: how it went, on one page."""

from vcpo.report.page import REPORT_FILE, SPEC_FILE, render_report, write_report

__all__ = ["REPORT_FILE", "SPEC_FILE", "render_report", "write_report"]
