"""Scores raw or prepared rows with a trained model."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import torch

from stampede import stores
from stampede.data import DataError, Part
from stampede.data.learning.learned import Learned, load
from stampede.data.learning.unknown_shares import Compared, Shares, UnknownIds, compared
from stampede.data.parallel import computed_ahead
from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST, Manifest, PartName
from stampede.data.prepared.reader import Shard, ShardedPart, open_part
from stampede.data.progress import RowProgress
from stampede.data.raw.files import expand
from stampede.data.raw.log import Chunk, labels_of, scoring_log
from stampede.data.raw.rows import BadRows
from stampede.data.raw.typed import LABEL, WEIGHT
from stampede.data.samples import Slice, by_goal
from stampede.engine.config import goal_weights
from stampede.engine.config.data import SyntheticSection
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import check_trained_with, inputs_folder, own_folder, remedy
from stampede.engine.inference.options import OWN_DATA, OnBadValue, PredictionOptions
from stampede.engine.inference.trained import Scored, Trained, new_output, scored, whole_model
from stampede.engine.metrics import PartMetrics, over_goals, probability
from stampede.engine.processes import choose_device
from stampede.engine.reading import open_dataset
from stampede.files import hidden, remove
from stampede.models import CTRModel
from stampede.models.negative_sampling import corrected

if TYPE_CHECKING:
    from stampede.engine.inference.frames import Frame

# Rows of a piece of prepared data.
_PIECE = 1 << 18


class Prediction(NamedTuple):
    """A summary of what was scored.

    Attributes:
        bad_rows: number of rows left out; they are in `bad_rows_file` if there are any.
        bad_values: numbers of values treated as missing, by column.
        seconds: of scoring, without loading the model.
        metrics: of `PartMetrics`, if there are labels.
        metrics_uncorrected: whether they are those of the scores before `corrected`.
        unknown: what to tell about missing and unseen ids; None if that is not known.
    """

    rows: int
    bad_rows: int
    bad_rows_file: Path
    bad_values: dict[str, int]
    seconds: float
    metrics: dict[str, Any]
    metrics_uncorrected: bool
    unknown: Compared | None


def predict(
    trained: Trained, inputs: list[str], output: Path, options: PredictionOptions
) -> Prediction:
    """Score rows, in order, in bounded memory; the file appears once it is complete.

    Its columns: `file`, for rows of files; `row`, int64, see `Piece.rows`; `score`, double, as
    floats cannot tell large logits apart; `label` and `weight`, float, if present. With several
    goals, `score_GOAL` and `label_GOAL` of each. Rows left out are listed beside it.

    Args:
        inputs: raw files or globs of them; one prepared folder; or `OWN_DATA`.
        output: a `.parquet` or `.csv` file.

    Raises:
        DataError: the inputs cannot be used, or do not match the training's.
        RunFolderError: the run cannot be used, or the output cannot be written.
        SettingsError: there is no such device.
    """
    if output.suffix not in (".parquet", ".csv"):
        raise RunFolderError(f"{output}: write a NAME.parquet or NAME.csv for the scores")
    bad_rows_file = output.with_suffix(".bad_rows.jsonl")
    aside = hidden(bad_rows_file, "tmp")
    advice = "--on-bad-row skip to leave such rows out"
    if options.on_bad_value == "error":
        advice += ", --on-bad-value missing to treat bad input values as missing"
    if not options.ignore_label:
        advice += ", --ignore-label to score without labels and weights"
    bad_rows = BadRows(options.on_bad_row, aside, advice)
    try:
        with new_output(output, options.overwrite) as unfinished:
            # Left by a process that was killed.
            remove(aside)
            rows = _rows(trained, inputs, options, bad_rows)
            if any(Path(name).resolve() == output.resolve() for name in rows.files):
                raise RunFolderError(
                    f"{output}: is also an input; write another name for the output"
                )
            model = whole_model(trained, choose_device(options.device, "--device"))
            started = time.perf_counter()
            is_csv = output.suffix == ".csv"
            count, metrics = _write(trained, model, rows, unfinished, options.batch_size, is_csv)
            seconds = time.perf_counter() - started
            # The bad rows of an output that was replaced.
            bad_rows_file.unlink(missing_ok=True)
            if aside.exists():
                os.replace(aside, bad_rows_file)
    finally:
        remove(aside)
    values = dict(bad_rows.values)
    uncorrected = model.negative_rate != 1.0 and not rows.files
    return Prediction(
        rows=count,
        bad_rows=bad_rows.count,
        bad_rows_file=bad_rows_file,
        bad_values=values,
        seconds=seconds,
        metrics=metrics,
        metrics_uncorrected=uncorrected,
        unknown=rows.told(),
    )


def _write(
    trained: Trained, model: CTRModel, rows: Rows, path: Path, batch_size: int, is_csv: bool
) -> tuple[int, dict[str, Any]]:
    """Write the scores, piece by piece; returns their number and the metrics."""
    files, goals = pyarrow.array(rows.files, pyarrow.string()), trained.data.goals
    name = files.type if is_csv else pyarrow.dictionary(pyarrow.int32(), files.type)
    columns = [("file", name)] * bool(rows.files)
    columns += [("row", pyarrow.int64())]
    columns += [(name, pyarrow.float64()) for name in names_by_goal("score", goals)]
    if rows.has_label:
        columns += [(name, pyarrow.float32()) for name in names_by_goal("label", goals)]
    columns += [("weight", pyarrow.float32())] * rows.has_weight
    about = {"checkpoint": str(trained.checkpoint), "epoch": str(trained.epoch)}
    schema = pyarrow.schema(columns, metadata=about)
    metrics, count = [PartMetrics(("calibration",)) for _ in goals or [""]], 0
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = pyarrow.csv.CSVWriter if is_csv else pyarrow.parquet.ParquetWriter
    with opened(path, schema, **({} if is_csv else {"compression": "zstd"})) as writer:
        for piece in _with_progress(rows):
            batches = zip(*scored(model, piece.part, batch_size), strict=True)
            found = Scored(*map(np.concatenate, batches))
            logits, labels = map(by_goal, found[:2])
            values = {"row": piece.rows, "weight": found.weight}
            right = _corrected(model, found.logits)
            scores = probability(by_goal(right))
            values |= zip(names_by_goal("score", goals), scores, strict=True)
            values |= zip(names_by_goal("label", goals), labels, strict=True)
            if rows.files:
                indices = np.full(len(piece.rows), piece.file, dtype=np.int32)
                values["file"] = pyarrow.DictionaryArray.from_arrays(indices, files)
            if rows.has_label:
                if rows.files:
                    # The run's own data lack the same negatives as its training part.
                    logits = by_goal(right)
                for of_goal, logit, label in zip(metrics, logits, labels, strict=True):
                    known = ~np.isnan(label)
                    of_goal.add(logit[known], label[known], found.weight[known])
            # A missing label is NaN here, and null there.
            arrays = [
                pyarrow.array(values[column.name], from_pandas=True).cast(column.type)
                for column in schema
            ]
            writer.write_table(pyarrow.table(arrays, schema=schema))
            count += len(piece.rows)
    if not any(of_goal.samples for of_goal in metrics):
        return count, {}
    results = [of_goal.result() for of_goal in metrics]
    if not goals:
        return count, results[0]
    weights = goal_weights(trained.config, goals)
    return count, over_goals(dict(zip(goals, results, strict=True)), weights)


def names_by_goal(name: str, goals: Sequence[str]) -> list[str]:
    """Names of a column of each goal; of a single label, the name itself."""
    return [f"{name}_{goal}" for goal in goals] or [name]


def score(
    trained: Trained,
    model: CTRModel,
    data: list[str] | Frame,
    batch_size: int,
    on_bad_value: OnBadValue = "error",
) -> tuple[np.ndarray, dict[str, int], Compared | None]:
    """Probabilities of a click, `[n]` float64, of all rows in order; labels are not read.

    With several goals they are `[n, goals]`.

    Args:
        model: with its tables.
        data: a frame, or inputs as for `predict`.

    Returns:
        The probabilities; the number of values treated as missing, by column; and what to tell
        about missing and unseen ids, None for prepared rows.

    Raises:
        DataError, RunFolderError: as for `predict`.
    """
    options = PredictionOptions(ignore_label=True, on_bad_value=on_bad_value)
    advice = 'on_bad_value="missing" to treat it as missing'
    if isinstance(data, list):
        advice = (
            'on_bad_value="missing" to treat bad values as missing, or `stampede predict '
            "--on-bad-row skip` to leave such rows out"
        )
    bad_rows = BadRows("error", remedy=advice)
    if isinstance(data, list):
        rows = _rows(trained, data, options, bad_rows)
        found, told = _probabilities(model, rows, batch_size), rows.told()
    else:
        found, told = _score_frame(trained, model, data, batch_size, bad_rows, options)
    return found, dict(bad_rows.values), told


def _score_frame(
    trained: Trained,
    model: CTRModel,
    frame: Frame,
    batch_size: int,
    bad_rows: BadRows,
    options: PredictionOptions,
) -> tuple[np.ndarray, Compared | None]:
    """Score a frame by way of a Parquet file, so that its values are read like a log's."""
    # Imports pandas, which the scoring of files does not need.
    from stampede.engine.inference.frames import columns_of

    learned, manifest = _learned(trained, "the frame")
    learned.schema = schema = learned.schema.model_copy(update={"format": "parquet"})
    if not len(frame):
        return _no_scores(model), None
    with tempfile.TemporaryDirectory(prefix="stampede-") as folder:
        file = Path(folder) / "frame.parquet"
        try:
            columns_of(frame, schema.used_columns()).write_parquet(file)
            rows = _rows_of_files([str(file)], learned, manifest, bad_rows, options)
            return _probabilities(model, rows, batch_size), rows.told()
        except DataError as failure:
            said = str(failure).replace(f"{file}: line", "the frame: row")
            raise DataError(said.replace(str(file), "the frame")) from None


class Piece(NamedTuple):
    """Some rows.

    Attributes:
        part: the rows' inputs.
        rows: `[n]` int64, each row's number in its file (counting bad rows) or part, from 0.
        file: number of the file; 0 for prepared data.
        position: how much has been read so far, in the units of `Rows.size`.
        unknown: counts of missing and unseen ids, see `UnknownIds`; None for prepared data.
    """

    part: Part
    rows: np.ndarray
    file: int
    position: int
    unknown: np.ndarray | None = None


class Rows(NamedTuple):
    """Rows to be scored.

    Attributes:
        size: of all rows, as bytes of files or a number of rows.
        files: names of raw files.
        has_label, has_weight: whether the rows have these columns.
        unknown: counts the missing and unseen ids of raw rows, once they are scored.
        recorded: their shares in prepared rows, if their preparation recorded them.
        source: of the manifest of the training's data.
    """

    pieces: Iterator[Piece]
    size: int
    files: tuple[str, ...]
    has_label: bool
    has_weight: bool
    unknown: UnknownIds | None = None
    recorded: Shares | None = None
    source: Mapping[str, Any] = {}

    def told(self) -> Compared | None:
        """What to tell about missing and unseen ids, once all rows are scored."""
        found = self.recorded if self.unknown is None else self.unknown.shares()
        return None if found is None else compared(found, self.source)


def _with_progress(rows: Rows) -> Iterator[Piece]:
    with RowProgress("scoring", rows.size) as progress:
        for piece in rows.pieces:
            yield piece
            if rows.unknown is not None:
                rows.unknown.counts += piece.unknown
            progress.advance_to(piece.position, len(piece.rows))


def _probabilities(model: CTRModel, rows: Rows, batch_size: int) -> np.ndarray:
    pieces = _with_progress(rows)
    batches = (batch for piece in pieces for batch in scored(model, piece.part, batch_size))
    found = (probability(_corrected(model, batch.logits)) for batch in batches)
    return np.concatenate([_no_scores(model), *found])


def _corrected(model: CTRModel, logits: np.ndarray) -> np.ndarray:
    """Logits among all samples, see `corrected`: float64 if the log kept a share of negatives."""
    if model.negative_rate == 1.0:
        return logits
    return corrected(torch.from_numpy(logits).double(), model.negative_rate).numpy()


def _no_scores(model: CTRModel) -> np.ndarray:
    return np.zeros(0 if model.goal_losses is None else (0, len(model.bias)))


def _rows(
    trained: Trained, inputs: list[str], options: PredictionOptions, bad_rows: BadRows
) -> Rows:
    """The rows of raw files, of one prepared folder, or of the run's own data."""
    is_own = OWN_DATA in inputs
    inputs = [n.removeprefix("file://") for n in inputs]
    inputs = [str(stores.fetched(n)) if _is_prepared_url(n) else n for n in inputs]
    if is_own and len(inputs) > 1:
        raise DataError(f"{OWN_DATA}: is the run's own data; write it alone, or write files")
    folders = [Path(name) for name in inputs if not is_own and os.path.isdir(name)]
    if folders and len(inputs) > 1:
        raise DataError(f"{folders[0]}: is a folder; write one prepared folder alone, or files")
    if is_own or (folders and (folders[0] / MANIFEST).exists()):
        part = options.part or "test"
        opened, has_weight, manifest = open_own_part(trained, part, None if is_own else folders[0])
    else:
        learned, manifest = _learned(trained, inputs[0])
        if options.part is not None:
            raise DataError(
                f"--part {options.part}: raw files such as {inputs[0]} have no parts; leave it "
                f"out, or write a prepared folder or {OWN_DATA}"
            )
        return _rows_of_files(inputs, learned, manifest, bad_rows, options)
    bounds = ((at, min(at + _PIECE, opened.rows)) for at in range(0, opened.rows, _PIECE))
    pieces = (Piece(Slice(opened, *both), np.arange(*both), 0, both[1]) for both in bounds)
    with_label = not options.ignore_label
    recorded = None if manifest is None else manifest.source.get("unknown_ids", {}).get(part)
    has_weight = with_label and has_weight
    return Rows(pieces, opened.rows, (), with_label, has_weight, recorded=recorded)


def _is_prepared_url(name: str) -> bool:
    return stores.is_url(name) and stores.exists(f"{name}/{MANIFEST}")


def open_own_part(
    trained: Trained, part: PartName, folder: Path | None = None
) -> tuple[Part, bool, Manifest | None]:
    """A part of the run's own data, or of a prepared folder with the same inputs.

    Returns:
        The part; whether it has weights; and its manifest, None for synthetic clicks.

    Raises:
        DataError: it is not there, has no rows, or does not match the training's.
    """
    if folder is None and isinstance(trained.config.data, SyntheticSection):
        dataset = open_dataset(trained.config, None)
        opened = getattr(dataset, part)
        if opened is None:
            raise DataError(f"the run's data have no {part} part; write another --part")
        return opened, dataset.has_weight, None
    folder = own_folder(trained.config, trained.run) if folder is None else folder
    other = "score raw files, or prepare them with `stampede apply`"
    manifest = check_trained_with(folder, trained.data, trained.checkpoint, other)
    if not manifest.rows(part):
        raise DataError(f"{folder}: the {part} part has no rows; write another --part")
    return open_part(folder, manifest, part), manifest.has_weight, manifest


def _learned(trained: Trained, asked: str) -> tuple[Learned, Manifest]:
    """The learned encodings that turn raw rows into inputs."""
    kept = inputs_folder(trained.config, trained.run)
    if kept is not None:
        manifest = check_trained_with(kept, trained.data, trained.checkpoint, remedy(kept))
        if (kept / LEARNED_FOLDER).is_dir():
            return load(kept / LEARNED_FOLDER, remedy(kept)), manifest
    raise DataError(
        f"{asked}: the run was trained on ids that were already rows of tables, so raw values "
        f"cannot be encoded; write a prepared folder, or {OWN_DATA} for the run's own data"
    )


def _rows_of_files(
    patterns: list[str],
    learned: Learned,
    manifest: Manifest,
    bad_rows: BadRows,
    options: PredictionOptions,
) -> Rows:
    log = scoring_log(
        learned.schema,
        expand(patterns),
        not options.ignore_label,
        options.on_bad_value == "missing",
    )
    encode = partial(_encoded, learned=learned, numbers_dtype=manifest.numbers_dtype)
    chunks = (chunk for chunk in log.chunks(bad_rows) if len(chunk.numbers))
    pieces = computed_ahead(encode, chunks, 2, threads=2)
    has_label, has_weight = bool(log.schema.label), log.schema.weight is not None
    files, unknown = tuple(map(str, log.files)), UnknownIds(learned.fields)
    source = manifest.source
    return Rows(pieces, log.bytes, files, has_label, has_weight, unknown, source=source)


def _encoded(chunk: Chunk, learned: Learned, numbers_dtype: str) -> Piece:
    frame, rows = chunk.frame, len(chunk.numbers)
    arrays, bags = learned.encode(frame, numbers_dtype)
    unknown = UnknownIds(learned.fields)
    unknown.add(arrays["ids"], [bag.values for bag in bags])
    goals = learned.schema.goals
    has_label = goals or LABEL in frame.columns
    arrays["label"] = labels_of(frame, goals) if has_label else np.zeros(rows, np.float32)
    if WEIGHT in frame.columns:
        arrays["weight"] = frame[WEIGHT].to_numpy()
    for i, bag in enumerate(bags):
        arrays[f"offsets_{i}"] = np.concatenate([[0], np.cumsum(bag.lengths)])
        arrays |= {f"{kind}_{i}": each for kind, each in bag.arrays().items()}
    # Polars' memory is read-only, which torch warns about.
    tensors = {
        name: torch.from_numpy(array if array.flags.writeable else array.copy())
        for name, array in arrays.items()
    }
    part = ShardedPart((Shard(rows, tensors),))
    return Piece(part, chunk.numbers, chunk.file, chunk.position, unknown.counts)
