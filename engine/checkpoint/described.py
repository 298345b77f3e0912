"""What a manifest says of tables, data and versions."""

from __future__ import annotations

from importlib import metadata

import torch

from stampede.data import Dataset
from stampede.engine.checkpoint.manifest import DataEntry, TableEntry
from stampede.models import StoredColumns, table_name


def table_entries(dataset: Dataset, dim: int) -> dict[str, TableEntry]:
    """All tables.

    Args:
        dim: width of the embedding.
    """
    columns = {name: list(where) for name, where in StoredColumns(dim).names.items()}
    return {
        table_name(field): TableEntry(field=field, rows=rows, columns=columns)
        for field, rows in dataset.vocabulary_sizes.items()
    }


def data_entry(dataset: Dataset) -> DataEntry:
    """What a run that continues another must have in common with it."""
    return DataEntry(
        vocabulary_sizes=dict(dataset.vocabulary_sizes),
        vocabulary_sha256=dataset.vocabulary_sha256,
        numbers=dataset.numbers,
        train_rows=dataset.train.rows,
        test_rows=dataset.test.rows,
    )


def versions() -> dict[str, str]:
    """Versions of what decides how a run goes on."""
    return {
        "stampede": metadata.version("stampede"),
        # The installed package's version does not say which build it is.
        "torch": torch.__version__,
        "torchrec": metadata.version("torchrec"),
    }
