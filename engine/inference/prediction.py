"""From a trained model and rows to a file of scores."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import polars as pl

from stampede.data import DataError
from stampede.data.errors import OnBadRow
from stampede.data.learning.learned import Learned
from stampede.data.prepared.manifest import MANIFEST, Manifest, PartName, read_manifest
from stampede.data.progress import RowProgress
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Quantiles, Schema, TimePart
from stampede.engine.config.data import SyntheticSection
from stampede.engine.datasets import open_dataset
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.inputs import inputs_folder, own_folder, read_learned, remedy
from stampede.engine.inference.model import Scored, Scorer, whole_model
from stampede.engine.inference.rows import (
    Piece,
    Rows,
    rows_of_dataset,
    rows_of_files,
    rows_of_folder,
)
from stampede.engine.inference.same_inputs import (
    check_same_inputs,
    check_same_vocabularies,
    check_trained_with,
)
from stampede.engine.inference.score_file import ScoreFile
from stampede.engine.inference.trained import Trained
from stampede.engine.metrics import PartMetrics, probability
from stampede.engine.processes import choose_device

OnBadValue = Literal["error", "missing"]

# Stands for the data that the run was trained and tested on.
OWN_DATA = "@run"

# That is scored unless another is asked for.
_PART: PartName = "test"

_OTHER_OWN_DATA = "score raw files, or what `stampede apply` makes of them"


@dataclass(frozen=True)
class PredictionOptions:
    """How rows are scored.

    Attributes:
        part: of prepared data; None: the test part, and raw files have none.
        on_bad_row: of raw files.
        on_bad_value: of raw files; `missing` takes a bad value of an input for a missing one, so
            that its row is scored.
        with_label: whether label and weight are read where they are there.
        batch_size: samples scored at a time.
        device: `auto`, `cpu` or `cuda`.
        overwrite: whether an existing output is replaced.
    """

    part: PartName | None = None
    on_bad_row: OnBadRow = "error"
    on_bad_value: OnBadValue = "error"
    with_label: bool = True
    batch_size: int = 8192
    device: str = "auto"
    overwrite: bool = False


@dataclass(frozen=True)
class Prediction:
    """What was done.

    Attributes:
        rows, bad_rows: scored, and left out.
        bad_rows_file: where these are; None where there are none.
        bad_values: values taken for missing ones, by column.
        seconds: that scoring took, without loading the model.
        metrics: `auc` and `logloss` where there are labels, None where undefined.
    """

    rows: int
    bad_rows: int
    bad_rows_file: Path | None
    bad_values: dict[str, int]
    seconds: float
    metrics: dict[str, Any]


def predict(
    trained: Trained, inputs: list[str], output: Path, options: PredictionOptions
) -> Prediction:
    """Score rows, in order, in bounded memory; the file appears when it is whole.

    Args:
        trained: the model.
        inputs: raw files or globs of them; one prepared folder; or `OWN_DATA`.
        output: a `.parquet` file, see `ScoreFile`.

    Raises:
        DataError: the inputs cannot be used, or are not those that the model was trained on.
        RunFolderError: the run cannot be used, or the output cannot be written.
        SettingsError: there is no such device.
    """
    with ScoreFile(output, options.overwrite) as file:
        bad_rows = BadRows(options.on_bad_row, file.unfinished_bad_rows, "--on-bad-row skip")
        rows = _rows(trained, inputs, options, bad_rows)
        if any(Path(name).resolve() == output.resolve() for name in rows.files):
            raise RunFolderError(f"{output}: is an input too; write another name for the output")
        scorer = Scorer(
            whole_model(trained, choose_device(options.device, "--device")), options.batch_size
        )
        about = {"checkpoint": str(trained.checkpoint), "epoch": str(trained.epoch)}
        file.begin(rows.files, rows.has_label, rows.has_weight, about)
        started = time.perf_counter()
        metrics = PartMetrics(()) if rows.has_label else None
        with RowProgress("scoring", rows.size) as progress:
            for piece in rows.pieces():
                _score(scorer, piece, file, metrics)
                progress.advance_to(piece.position, len(piece.rows))
        found = metrics.result() if metrics and file.rows else {}
        seconds = time.perf_counter() - started
    return Prediction(
        rows=file.rows,
        bad_rows=bad_rows.count,
        bad_rows_file=file.bad_rows if bad_rows.count else None,
        bad_values=dict(bad_rows.values),
        seconds=seconds,
        metrics={name: found[name] for name in ("auc", "logloss") if name in found},
    )


def score(trained: Trained, scorer: Scorer, inputs: list[str]) -> np.ndarray:
    """Probabilities of a click, `[n]` float64, of all rows in order; labels are not looked at.

    Args:
        trained: the model.
        scorer: of the same model.
        inputs: as of `predict`.

    Raises:
        DataError, RunFolderError: as of `predict`.
    """
    bad_rows = BadRows("error", option="`stampede predict --on-bad-row skip`")
    rows = _rows(trained, inputs, PredictionOptions(with_label=False), bad_rows)
    with RowProgress("scoring", rows.size) as progress:
        found = []
        for piece in rows.pieces():
            found += [probability(scored.logits) for scored in scorer.scored(piece.part)]
            progress.advance_to(piece.position, len(piece.rows))
    return np.concatenate(found) if found else np.zeros(0)


def score_frame(trained: Trained, scorer: Scorer, frame: pd.DataFrame | pl.DataFrame) -> np.ndarray:
    """As `score`, of the rows of a frame.

    The frame goes through a temporary Parquet file, so that its values are read as those of a log.

    Raises:
        DataError: it lacks a column, or a value of it cannot be read.
        RunFolderError: the run cannot be used.
    """
    kept = inputs_folder(trained.config, trained.run)
    learned, manifest = _learned(trained, kept, "the frame")
    learned.schema = schema = learned.schema.model_copy(update={"format": "parquet"})
    used = [column for column in frame.columns if column in schema.used_columns()]
    if isinstance(frame, pd.DataFrame):
        _check_ids(frame, schema)
        frame = pl.from_pandas(frame[used])
    if not len(frame):
        return np.zeros(0)
    with tempfile.TemporaryDirectory(prefix="stampede-") as folder:
        file = Path(folder) / "frame.parquet"
        try:
            frame.select(used).write_parquet(file)
            bad_rows = BadRows("error", option="drop them")
            rows = rows_of_files([str(file)], learned, manifest.numbers_dtype, bad_rows, False)
            parts = [scorer.scored(piece.part) for piece in rows.pieces()]
            return np.concatenate([probability(one.logits) for part in parts for one in part])
        except DataError as failure:
            raise DataError(str(failure).replace(str(file), "the frame")) from None


def _check_ids(frame: pd.DataFrame, schema: Schema) -> None:
    """Refuse whole numbers that pandas made floats: nobody knows whether an id was 3 or 3.0."""
    for name, field in schema.ids.items():
        column = getattr(field, "column", "") or name
        is_cut = isinstance(field, Quantiles | TimePart)
        if column in frame and not is_cut and pd.api.types.is_float_dtype(frame[column]):
            raise DataError(
                f"the frame: column {column!r} holds ids but is stored as {frame[column].dtype}, "
                "as pandas stores whole numbers of which some are missing; read it with "
                f"dtype={{{column!r}: str}}, or write frame[{column!r}].astype('Int64')"
            )


def _score(scorer: Scorer, piece: Piece, file: ScoreFile, metrics: PartMetrics | None) -> None:
    columns = Scored(*map(np.concatenate, zip(*scorer.scored(piece.part), strict=True)))
    if metrics is not None:
        metrics.add(*columns)
    file.append(piece.file, piece.rows, *columns)


def _rows(
    trained: Trained, inputs: list[str], options: PredictionOptions, bad_rows: BadRows
) -> Rows:
    kept = inputs_folder(trained.config, trained.run)
    if OWN_DATA in inputs and len(inputs) > 1:
        raise DataError(f"{OWN_DATA}: is the run's own data and stands alone; write it, or files")
    if inputs == [OWN_DATA]:
        return _own_rows(trained, options)
    folders = [Path(name) for name in inputs if os.path.isdir(name)]
    if folders and len(inputs) > 1:
        raise DataError(f"{folders[0]}: is a folder; write one prepared folder, or files")
    if folders and (folders[0] / MANIFEST).exists():
        return _prepared_rows(trained, kept, folders[0], options)
    learned, manifest = _learned(trained, kept, inputs[0])
    if options.part is not None:
        raise DataError(
            f"--part {options.part}: raw files such as {inputs[0]} have no parts; leave it out, or "
            f"write a prepared folder or {OWN_DATA}"
        )
    return rows_of_files(
        inputs,
        learned,
        manifest.numbers_dtype,
        bad_rows,
        with_label=options.with_label,
        bad_values_are_missing=options.on_bad_value == "missing",
    )


def _learned(trained: Trained, kept: Path | None, asked: str) -> tuple[Learned, Manifest]:
    """What turns raw rows into inputs of a model."""
    if kept is not None:
        manifest = check_trained_with(kept, trained, trained.checkpoint, remedy(kept))
        learned = read_learned(kept, manifest)
        if learned is not None:
            return learned, manifest
    raise DataError(
        f"{asked}: the run was trained on data whose ids were rows of tables already, so nobody "
        f"knows what raw values mean; write a prepared folder, or {OWN_DATA} for its own data"
    )


def _own_rows(trained: Trained, options: PredictionOptions) -> Rows:
    data = trained.config.data
    if isinstance(data, SyntheticSection):
        # It is made by no other process.
        dataset = open_dataset(trained.config, None)
        return rows_of_dataset(dataset, options.part or _PART, options.with_label)
    folder = own_folder(trained.config, trained.run)
    check_trained_with(folder, trained, trained.checkpoint, _OTHER_OWN_DATA)
    return rows_of_folder(folder, options.part or _PART, options.with_label)


def _prepared_rows(
    trained: Trained, kept: Path | None, folder: Path, options: PredictionOptions
) -> Rows:
    manifest = read_manifest(folder)
    check_same_inputs(manifest, trained, folder, trained.checkpoint)
    if kept is not None:
        learned = check_trained_with(kept, trained, trained.checkpoint, remedy(kept))
        check_same_vocabularies(manifest, learned, folder)
    return rows_of_folder(folder, options.part or _PART, options.with_label)
