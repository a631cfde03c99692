"""A table, once: its columns and the texts in its cells. Every kind of page has one writer of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """columns: by name what each says in plain words, "" where the name says it; rows: a text for each column."""

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Its lines in Markdown."""
        rows = ["".join(f" {cell} |" if cell else " |" for cell in row) for row in (list(self.columns), *self.rows)]
        return [f"|{rows[0]}", "|" + "---|" * len(self.columns), *(f"|{row}" for row in rows[1:])]
