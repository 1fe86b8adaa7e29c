"""Names around tables that help texts and argument checks need before anything is imported: file suffixes and tasks."""

from __future__ import annotations

from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), ".parquet")
TASKS = ("classification", "regression")


def is_table_file(path: Path) -> bool:
    """Whether the name is that of a file with a table of named columns."""
    return path.name.lower().endswith(TABLE_SUFFIXES)
