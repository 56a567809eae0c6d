"""One offline HTML file of a run: `unmerge.report.write("out/")`."""

from unmerge.report.page import render, write
from unmerge.report.parts import Report, read

__all__ = ["Report", "read", "render", "write"]
