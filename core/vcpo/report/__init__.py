"""The HTML report of a run: how it went, on one page."""

from vcpo.report.page import REPORT_FILE, render_report, write_report
from vcpo.report.recorded_run import SPEC_FILE, RecordedRun

__all__ = ["REPORT_FILE", "SPEC_FILE", "RecordedRun", "render_report", "write_report"]
