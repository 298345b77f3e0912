"""Initial embeddings from a file of vectors that were trained elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import torch

from stampede import stores
from stampede.data import DataError, Dataset
from stampede.engine.checkpoint.manifest import weights_name
from stampede.engine.checkpoint.tensors import copy_rows_
from stampede.engine.config import Config
from stampede.engine.config.data import SyntheticSection
from stampede.engine.inference.kept import meanings_of_rows, row_names
from stampede.engine.job import Job
from stampede.engine.processes import Processes
from stampede.engine.reading import data_folder


@torch.no_grad()
def fill_pretrained(
    config: Config, job: Job, dataset: Dataset, processes: Processes, *, frozen: bool
) -> list[str]:
    """Give the ids of fields the vectors of `model.pretrained`; all ranks must call it.

    In a later period of a log, only its new ids. First-order weights, and rows without a vector,
    keep their initial values; in frozen tables, which would never learn them, both are zeros.

    Args:
        frozen: fill the frozen tables; else those that are trained.

    Returns:
        A line for each field: how many of its rows have a vector.

    Raises:
        DataError: a file cannot be used.
    """
    lines = []
    for field, given in config.model.pretrained.items():
        if given.train is frozen:
            continue
        dim = job.front.columns_of(field).dim
        rows, vectors = processes.on_main(
            lambda field=field, file=given.path, dim=dim: _matched(
                config, dataset, field, file, dim
            )
        )
        due = np.full(len(rows), dataset.period <= 1)
        if dataset.period > 1:
            due[dataset.rows_of_new_ids.get(field, [])] = True
        state = job.model.state_dict()
        # A process may hold some tables only.
        table = state.get(weights_name(field, state))
        if table is not None:
            if frozen:
                # Also what they have from another run.
                zeros = torch.zeros(1, table.size()[1])
                copy_rows_(table, zeros, torch.from_numpy(np.where(due, 0, -1)))
            copy_rows_(table, torch.from_numpy(vectors), torch.from_numpy(np.where(due, rows, -1)))
        job.model.load_state_dict(state)
        have, count = int((due & (rows >= 0)).sum()), int(due.sum())
        without = f"{count - have:,} without one as usual"
        if frozen:
            without = (
                f"{count - have:,} without one are zeros; training leaves them all as they are"
            )
        elif config.checkpoint.init_from and dataset.period <= 1:
            without += "; rows loaded from checkpoint.init_from replace both"
        what = "new rows" if dataset.period > 1 else "rows"
        lines.append(
            f"model.pretrained.{field}: {have:,} of {count:,} {what} begin with a vector of "
            f"{given.path}; {without}"
        )
    return lines


def _matched(
    config: Config, dataset: Dataset, field: str, file: str, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """The vector of each row of the field's table, -1 for none; and the vectors."""
    folder = None if isinstance(config.data, SyntheticSection) else data_folder(config)
    count = dataset.vocabulary_sizes[field]
    if meanings_of_rows(folder, {field: count})[field].encode == "hash":
        raise DataError(
            f"model.pretrained: {field!r} has encode: hash, whose rows are those of no single id; "
            "write encode: vocabulary in the schema"
        )
    names = row_names(folder, field, count)
    path = stores.fetched(file)
    ids, vectors = _read(path, field, dim)
    places = dict(zip(ids, range(len(ids)), strict=True))
    rows = np.array([places.get(str(name), -1) for name in names], dtype=np.int64)
    if not (rows >= 0).any():
        raise DataError(
            f"{path}: none of its {len(ids):,} ids is one of the field {field!r}; write the ids "
            "as in the log"
        )
    return rows, vectors


def _read(path: Path, field: str, dim: int) -> tuple[list[str], np.ndarray]:
    """Ids as text, and their vectors `[n, dim]` float32."""
    try:
        frame = pl.read_parquet(path, glob=False)
    except (OSError, pl.exceptions.PolarsError) as failure:
        reason = str(failure).splitlines()[0]
        raise DataError(f"{path}: cannot be read as Parquet ({reason:.200})") from None
    of_vectors = [s.name for s in frame if isinstance(s.dtype, pl.List | pl.Array)]
    if len(frame.columns) != 2 or len(of_vectors) != 1:
        raise DataError(
            f"{path}: found the columns {', '.join(frame.columns)}; write two, ids and lists of "
            "numbers"
        )
    (column,) = of_vectors
    (of_ids,) = set(frame.columns) - {column}
    ids, vectors = frame[of_ids].cast(pl.String), frame[column]
    try:
        vectors = vectors.cast(pl.List(pl.Float32))
    except pl.exceptions.PolarsError:
        raise DataError(
            f"{path}, column {column}: found lists of {vectors.dtype.inner}; write lists of numbers"
        ) from None
    if vectors.null_count():
        row = int(vectors.is_null().arg_max())
        raise DataError(
            f"{path}, row {row + 1}, column {column}: found no vector; leave the row out"
        )
    other = vectors.list.len() != dim
    if other.any():
        row = int(other.arg_max())
        width = len(vectors[row])
        raise DataError(
            f"{path}, row {row + 1}, column {column}: found a vector of {width} numbers, but "
            f"embeddings of {field} have {dim}; write vectors of that width, or "
            f"model.dims.{field}={width}"
        )
    if ids.is_duplicated().any():
        raise DataError(
            f"{path}, column {of_ids}: found {ids.filter(ids.is_duplicated())[0]!r} twice; write "
            "each id once"
        )
    values = vectors.explode().to_numpy().reshape(-1, dim)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).any(1).argmax())
        raise DataError(
            f"{path}, row {row + 1}: found a number that is not finite; write finite ones"
        )
    return ids.to_list(), values
