"""Exports packages: folders that score without stampede."""

from __future__ import annotations

import errno
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from stampede.data import formulas
from stampede.data.learning.learned import NumberRange, read_saved
from stampede.data.learning.row_meanings import RowMeanings
from stampede.data.learning.rows_of_ids import FIRST_ROW
from stampede.data.prepared.manifest import LEARNED_FOLDER
from stampede.data.schema.schema import RULES, Hashed, Integers, NumberField, TimePart
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.dense_part import describe, export_dense_part
from stampede.engine.inference.kept import (
    check_trained_with,
    inputs_folder,
    meanings_of_rows,
    remedy,
)
from stampede.engine.inference.options import RowType
from stampede.engine.inference.package.update import PACKAGE, sealed
from stampede.engine.inference.trained import Trained, dense_model
from stampede.engine.tables import FieldWeights, read_stored_field
from stampede.files import hidden, make_folder, publish_folder, remove, to_json

_LOADER = Path(__file__).parent / "package"
_FORMAT = 5

_INT8 = 127
_CHUNK = 1 << 20


def export(trained: Trained, folder: Path, rows: RowType, overwrite: bool) -> None:
    """Write a package; the folder appears once it is complete.

    `package.json` describes the inputs and lists the SHA-256 of all files. `dense.json` and
    `dense.safetensors` are the dense part. `tables/` and `vocabularies/` have a file for each
    field, but none for fields that use the `table` of another. `load.py` is the loader.

    Args:
        rows: how tables are stored, see `stored_rows`.
        overwrite: whether an existing package is replaced.

    Raises:
        RunFolderError: the folder exists or cannot be written, or the run cannot be used.
    """
    # "." has no name, and a link could not be replaced.
    folder = folder.resolve()
    fill = partial(_fill, trained=trained, rows=rows)
    if make_folder(folder, fill, RunFolderError):
        return
    if not overwrite:
        raise RunFolderError(f"{folder}: already exists; write --overwrite, or another folder")
    if not (folder / PACKAGE).is_file():
        raise RunFolderError(
            f"{folder}: is not an exported package ({PACKAGE} is missing), so it is not "
            "overwritten; write another folder"
        )
    fresh = hidden(folder, "new")
    remove(fresh)
    make_folder(fresh, fill, RunFolderError)
    publish_folder(fresh, folder)


def _fill(folder: Path, trained: Trained, rows: RowType) -> None:
    about, meanings = described_model(trained, rows)
    for source in (*_LOADER.glob("*.py"), Path(formulas.__file__)):
        (folder / source.name).write_bytes(source.read_bytes())
    graph, weights = describe(export_dense_part(dense_model(trained)))
    (folder / "dense.json").write_text(to_json(graph) + "\n", encoding="utf-8")
    save(weights, folder / "dense.safetensors")
    # One vocabulary or table at a time: only the largest must fit into memory.
    (folder / "vocabularies").mkdir()
    for name, of_field in meanings.items():
        if of_field.values is not None and of_field.entry.table is None:
            save(of_field.values().to_frame(), folder / "vocabularies" / f"{name}.parquet")
    (folder / "tables").mkdir()
    names = [field["name"] for field in about["fields"] if field["table"] is None]
    for name in tqdm(names, "exporting tables", unit=" tables", delay=1, disable=None):
        tensors = stored_rows(read_stored_field(trained.checkpoint, name), rows, name)
        save(tensors, folder / "tables" / f"{name}.safetensors")
    about = {"format": _FORMAT, **about}
    (folder / PACKAGE).write_text(sealed(about, folder), encoding="utf-8")


def described_model(
    trained: Trained, rows: RowType
) -> tuple[dict[str, Any], dict[str, RowMeanings]]:
    """How a model's inputs are made from columns, and what rows of its tables mean, by field.

    Raises:
        RunFolderError, DataError: the run's vocabularies belong to another model, or are damaged.
    """
    data, kept = trained.data, inputs_folder(trained.config, trained.run)
    # Without a schema, ids are rows and numbers are transformed already.
    numbers = {f"I{i + 1}": NumberField(transform=[]) for i in range(data.numbers)}
    dtype, ranges, missing, time = "float32", {}, [""], None
    if kept is not None:
        manifest = check_trained_with(kept, data, trained.checkpoint, remedy(kept))
        numbers = {name: NumberField(transform=[]) for name in manifest.numbers}
        dtype = manifest.numbers_dtype
        if (kept / LEARNED_FOLDER).is_dir():
            saved = read_saved(kept / LEARNED_FOLDER, remedy(kept))
            schema, ranges = saved.schema_, saved.ranges
            numbers, missing = schema.numbers, schema.missing
            if any(isinstance(field, TimePart) for field in schema.ids.values()):
                time = schema.time.model_dump()
    meanings = meanings_of_rows(kept, data.vocabulary_sizes)
    statistics = ("low", "high", "mean", "deviation")
    about = {
        "stampede": metadata.version("stampede"),
        "torch": torch.__version__,
        "checkpoint": str(trained.checkpoint),
        "epoch": trained.epoch,
        "network": trained.config.model.name,
        "dim": trained.config.model.dim,
        "first_order_scale": trained.config.model.first_order_scale,
        "rows": rows,
        "goals": data.goals,
        "negative_rate": trained.config.train.negative_rate,
        "fields": [_described(of_field) for of_field in meanings.values()],
        "numbers": [
            {
                "name": name,
                "column": field.column or name,
                "fill": field.fill,
                "transform": field.transform,
                **{key: getattr(ranges.get(name, NumberRange()), key) for key in statistics},
            }
            for name, field in numbers.items()
        ],
        "numbers_dtype": dtype,
        "missing": missing,
        "rules": RULES,
        "time": time,
    }
    return about, meanings


def _described(meanings: RowMeanings) -> dict[str, Any]:
    entry = meanings.entry
    # Without a schema, ids are rows already.
    field = meanings.field or Integers(size=entry.rows, separator="," if entry.multi else None)
    about = {
        **entry.model_dump(),
        "column": field.column or entry.name,
        "separator": field.separator,
        "max_ids": field.max_ids,
        "keep": field.keep,
        "weights": field.weights,
        "encode": meanings.encode,
    }
    if isinstance(field, TimePart):
        about["column"] = None
    elif isinstance(field, Hashed):
        about |= {"buckets": field.buckets, "seed": field.seed}
    elif isinstance(field, Integers):
        about["size"] = field.size
    elif meanings.values is not None:
        about["first_row"] = FIRST_ROW
    else:
        about["edges"] = meanings.edges
    return about


def save(content: dict[str, Tensor] | pl.DataFrame, path: Path) -> None:
    """Write tensors as a safetensors file, or a frame as a Parquet file."""
    path.touch()
    mode = path.stat().st_mode
    try:
        if isinstance(content, pl.DataFrame):
            content.write_parquet(path)
        else:
            save_file(content, path)
    except (SafetensorError, pl.exceptions.PolarsError) as failure:
        raise OSError(errno.EIO, str(failure)) from None
    # safetensors makes it readable for its owner only.
    path.chmod(mode)


def stored_rows(weights: FieldWeights, kind: RowType, field: str) -> dict[str, Tensor]:
    """Tensors of one table.

    `fp32` is exact. `fp16` rounds each value to 11 bits. `int8` stores an embedding as whole
    numbers times its row's scale, the largest absolute value / 127, so the error is at most half a
    scale; the row's first-order weight is fp16.

    Returns:
        `embedding` `[rows, dim]`, `first_order` `[rows]`, and for int8 `scale` `[rows]` float32.

    Raises:
        RunFolderError: a weight is too large for fp16.
    """
    embedding, first_order = weights.embedding, weights.first_order.squeeze(1)
    if kind == "fp32":
        return {"embedding": embedding.contiguous(), "first_order": first_order.contiguous()}
    halves = {"first_order": _half(first_order, field)}
    if kind == "fp16":
        return {"embedding": _half(embedding, field), **halves}
    scale = embedding.abs().amax(1) / _INT8
    # The scale of a row of zeros is 0.
    divisor = scale[:, None].clamp_min(torch.finfo(torch.float32).tiny)
    whole = [
        (values / by).round().clamp(-_INT8, _INT8).to(torch.int8)
        for values, by in zip(embedding.split(_CHUNK), divisor.split(_CHUNK), strict=True)
    ]
    return {"embedding": torch.cat(whole), "scale": scale, **halves}


def _half(values: Tensor, field: str) -> Tensor:
    halves = values.to(torch.float16, memory_format=torch.contiguous_format)
    if not halves.isfinite().all():
        raise RunFolderError(
            f"field {field}: a weight of {values.abs().max():g} is too large for fp16, or not "
            "finite; write --rows fp32"
        )
    return halves
