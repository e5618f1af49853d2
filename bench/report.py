"""What every benchmark prints: a table for people, its bars, and one JSON line last."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach; `met` says whether it does."""

    name: str
    met: bool
    detail: str = ""


@dataclass(slots=True)
class Report:
    """The figures of one run; `rows` are the lines of the table."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def print(self) -> None:
        """The table, the bars, and as the last line the JSON object."""
        self.show()
        print(json.dumps({"figures": self.figures, "bars": {b.name: b.met for b in self.bars}}))

    def show(self) -> None:
        """The table and the bars alone, of a part of what is printed."""
        console = Console()
        table = Table(title=self.title)
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*(_cell(value) for value in row))
        console.print(table)
        for bar in self.bars:
            verdict = "[green]met[/]" if bar.met else "[red]NOT met[/]"
            console.print(f"  {verdict}  {bar.name}  {bar.detail}")

    def exit(self, *, enforce: bool) -> None:
        """With `enforce`, exit with 1 when a bar is not met."""
        if enforce and not all(bar.met for bar in self.bars):
            sys.exit(1)


def progress(line: str) -> None:
    """Tell on stderr what is going on."""
    print(line, file=sys.stderr, flush=True)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
