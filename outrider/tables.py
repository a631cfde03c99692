"""A table, independent of the page's format: its columns and the texts of its cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table. columns: a description by column name, "" if the name is enough; rows: one text per column."""

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """The table as lines of Markdown."""
        rows = ["".join(f" {cell} |" if cell else " |" for cell in row) for row in (list(self.columns), *self.rows)]
        return [f"|{rows[0]}", "|" + "---|" * len(self.columns), *(f"|{row}" for row in rows[1:])]
