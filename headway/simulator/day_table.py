"""Table of a day under the autoscaler."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from headway.core.scaling.scaler import RULES
from headway.simulator.day import DayReport
from headway.simulator.table import standard_console


def show_day(reports: Sequence[DayReport], title: str) -> None:
    """Print one line for each policy."""
    hours = {one.policy: one.gpu_hours for one in reports}
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("policy", "GPU-hours", f"of {RULES}", "in promise", "refused", "ups", "downs", "workers", "load"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for one in reports:
        table.add_row(
            one.policy,
            f"{one.gpu_hours:,.0f}",
            f"{one.gpu_hours / hours[RULES]:.2f}",
            f"{one.within:.2%}",
            f"{one.refused:.2%}",
            str(one.ups),
            str(one.downs),
            f"{one.fewest}–{one.most}",
            f"{one.utilisation:.0%}",
        )
    standard_console().print(table)
