"""The result of an analysis."""

from typing import Any, NamedTuple

from matplotlib.figure import Figure


class Analysis(NamedTuple):
    """The result of an analysis.

    Args:
        lines: the lines to print.
        figure: the picture, or None.
        report: the numbers for --json, or None.
    """

    lines: list[str]
    figure: Figure | None = None
    report: dict[str, Any] | None = None
