"""Draw: one self-contained HTML page from run folders and results."""

from onelaunch.report.write import write_report

__all__ = ["write_report"]
