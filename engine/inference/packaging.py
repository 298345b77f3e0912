"""Exports packages, folders that score without stampede, and the changes since an earlier one."""

from __future__ import annotations

import errno
import operator
import shutil
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.nn import functional
from tqdm.auto import tqdm

from stampede.data import formulas
from stampede.data.learning.learned import NumberRange, read_saved
from stampede.data.learning.row_meanings import RowMeanings
from stampede.data.learning.vocabulary import FIRST_ROW
from stampede.data.prepared.manifest import LEARNED_FOLDER
from stampede.data.schema.schema import RULES, Hashed, Integers, NumberField, TimePart
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import (
    check_trained_with,
    inputs_folder,
    meanings_of_rows,
    remedy,
)
from stampede.engine.inference.package import update
from stampede.engine.inference.package.dense import ARITHMETIC, argument, find_operator
from stampede.engine.inference.package.load import together
from stampede.engine.inference.package.update import PACKAGE, sealed
from stampede.engine.inference.trained import Trained, dense_model
from stampede.engine.tables import FieldWeights, read_stored_field
from stampede.files import hidden, make_folder, publish_folder, remove, to_json
from stampede.models import CTRModel, StoredColumns
from stampede.models.histories import Padded
from stampede.models.negative_sampling import corrected

RowType = Literal["fp32", "fp16", "int8"]

_LOADER = Path(__file__).parent / "package"
_FORMAT = 4

_INT8 = 127
_CHUNK = 1 << 20

# Of the example input. Not 1: torch.export would take it for a fixed size.
SAMPLES = 4


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


class DensePart(nn.Module):
    """From looked-up rows and numbers to logits; the model's tables are removed."""

    def __init__(self, model: CTRModel) -> None:
        super().__init__()
        front = model.front
        front.drop_tables()
        self.model = model
        self.pooled = [front.columns_of(field) for field in front.pooled]
        self.histories = {field: front.columns_of(field) for field in front.histories}

    def forward(
        self,
        rows: Tensor,
        numbers: Tensor,
        values: Sequence[Tensor] = (),
        is_id: Sequence[Tensor] = (),
    ) -> Tensor:
        """Logits `[n]`, or `[n, goals]`.

        Args:
            rows: `[n, pooled fields, dim + 1]`, embedding and first-order weight of each field; if
                fields differ in width, `[n, sum of dim + 1]`.
            numbers: `[n, numbers]`.
            values: of each history `[n, most, dim + 1]`, the same of each id.
            is_id: of each history `[n, most]`, whether there is an id at a place.
        """
        read = {
            name: Padded(_padded(one, columns), mask)
            for (name, columns), one, mask in zip(
                self.histories.items(), values, is_id, strict=True
            )
        }
        if rows.ndim == 3:
            stored = _padded(rows, self.pooled[0]).flatten(1)
        else:
            parts = rows.split([columns.dim + 1 for columns in self.pooled], 1)
            stored = torch.cat(list(map(_padded, parts, self.pooled)), 1)
        logits = self.model.logits(stored, numbers, histories=read)
        return corrected(logits, self.model.negative_rate)


def _padded(rows: Tensor, columns: StoredColumns) -> Tensor:
    """Rows `[..., dim + 1]` as they are stored."""
    return functional.pad(rows, [0, columns.stored - columns.dim - 1])


def export_dense_part(model: CTRModel) -> ExportedProgram:
    """The dense part of a model, whose tables are removed, for any number of samples.

    Raises:
        RunFolderError: torch cannot export it; this happens with users' own networks.
    """
    front, samples = model.front, Dim("samples", min=1)
    pooled, histories = (
        [front.columns_of(field).dim + 1 for field in fields]
        for fields in (front.pooled, front.histories)
    )
    inputs = (
        together([torch.zeros(SAMPLES, columns) for columns in pooled]),
        torch.zeros(SAMPLES, model.numbers),
        [torch.zeros(SAMPLES, SAMPLES + 1, columns) for columns in histories],
        [torch.ones(SAMPLES, SAMPLES + 1, dtype=torch.bool) for _ in histories],
    )
    of_history = [{0: samples, 1: Dim.DYNAMIC} for _ in histories]
    of_rows = {0: samples}
    shapes = {"rows": of_rows, "numbers": of_rows, "values": of_history, "is_id": of_history}
    return exported(DensePart(model), inputs, shapes, model.network)


def exported(
    module: nn.Module, inputs: tuple[Any, ...], shapes: dict[str, Any], network: nn.Module
) -> ExportedProgram:
    """A module with a network as a program of torch operators; `shapes` are the dynamic ones."""
    try:
        with torch.no_grad():
            # Without `strict`, torch.export takes `len(embeddings)` in a network for fixed.
            return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=True)
    except Exception as failure:
        reason = ": ".join([type(failure).__name__, *str(failure).strip().splitlines()[:1]])
        raise RunFolderError(
            f"torch.export cannot export the network {type(network).__name__}: {reason}; its "
            "forward must not branch on tensor values"
        ) from failure


def describe(program: ExportedProgram) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The contents of `dense.json` and `dense.safetensors` for a program; see `package/dense.py`.

    Raises:
        RunFolderError: it has an operator that packages do not support.
    """
    weights, known = {}, {}
    tensors = {**program.constants, **program.state_dict}
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            # Two names may share one parameter, which safetensors does not support.
            weight = tensors[spec.target].detach()
            weights[spec.target] = weight.clone(memory_format=torch.contiguous_format)
            known[spec.arg.name] = {"weight": spec.target}

    def described(given: Any) -> Any:
        if isinstance(given, Node):
            return known.get(given.name, {"value": given.name})
        if isinstance(given, list | tuple):
            return [described(one) for one in given]
        return argument(given)

    nodes = [node for node in program.graph.nodes if node.op != "placeholder"]
    output = nodes.pop().args[0][0]
    steps, needed = [], {output}
    for node in reversed(nodes):
        schema = getattr(node.target, "_schema", None)
        # Skip unused results, and assertions, which return nothing.
        if node not in needed and not (schema is not None and schema.is_mutable):
            continue
        needed.update(node.all_input_nodes)
        is_of_python = node.target in (*ARITHMETIC.values(), operator.getitem)
        name = node.target.__name__ if is_of_python else str(node.target).removeprefix("aten.")
        try:
            find_operator(name)
            step = {"name": node.name, "operator": name, "arguments": described(node.args)}
            if node.kwargs:
                step["named"] = {key: described(one) for key, one in node.kwargs.items()}
        except ValueError as failure:
            raise RunFolderError(
                f"the network cannot be exported: {failure}; use other torch functions in its "
                "forward"
            ) from None
        steps.append(step)
    trained = [name for name in weights if tensors[name].requires_grad]
    return {"steps": steps[::-1], "output": output.name, "trained": trained}, weights


class Delta(NamedTuple):
    """Sizes of a delta."""

    rows: int  # of all tables after the update
    changed: int  # rows that are new or have new values
    ids: int  # lines of vocabularies that are new or have new ids


def export_delta(trained: Trained, base: Path, folder: Path, tolerance: float = 0.0) -> Delta:
    """Write the differences from a package; the folder appears once it is complete.

    `delta.json` identifies the base package; `package.json` describes the updated package.
    `changes/` holds the changed rows of tables and ids of vocabularies. The dense part is complete.

    Args:
        base: a package made by `export` or `update.py`; tables are stored as in it.
        tolerance: a row is unchanged if no value moved by more than this.

    Raises:
        RunFolderError: the base is not a package or has other fields, or the folder exists or
            cannot be written.
    """
    try:
        before = update.load.checked(base)
    except ValueError as failure:
        raise RunFolderError(
            f"{failure}; write a package made by `stampede export` or update.py"
        ) from None
    found: list[Delta] = []

    def fill(unfinished: Path) -> None:
        # Inside the unfinished folder, so that a killed process leaves nothing else behind.
        whole, made = unfinished / "whole", unfinished / "made"
        export(trained, whole, before["rows"], overwrite=False)
        after = update.load.read_about(whole)
        why = _incomparable(before, after)
        if why:
            raise RunFolderError(f"{base}: {why}; export a full package once")
        found.append(_write_changes(base, whole, unfinished, list(after["files"]), tolerance))
        try:
            # Apply the delta as a server will. With a tolerance, the result differs from a full
            # export and gets its own description.
            update.patch(base, unfinished, made, checked=tolerance == 0.0)
        except ValueError as failure:
            raise RunFolderError(
                f"the delta would not reproduce a full export ({failure}); export a full package "
                "once"
            ) from None
        shutil.copyfile(made / PACKAGE, unfinished / PACKAGE)
        for done in (whole, made):
            shutil.rmtree(done)

    if not make_folder(folder, fill, RunFolderError):
        raise RunFolderError(f"{folder}: already exists; write another folder")
    return found[0]


def _incomparable(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Why there can be no delta between two packages; empty if there can."""
    names = [[field["name"] for field in about["fields"]] for about in (before, after)]
    if names[0] != names[1]:
        return "its fields differ from the model's"
    for name, entry in after["files"].items():
        if name.endswith(".py") and before["files"].get(name) != entry:
            return (
                f"its {name} is from another version of stampede, and a delta does not update "
                "programs"
            )
    return ""


def _write_changes(
    base: Path, whole: Path, delta: Path, names: list[str], tolerance: float
) -> Delta:
    rows = changed_rows = changed_ids = 0
    tables, vocabularies, sizes = {}, {}, {}
    (delta / "changes").mkdir()
    for name in names:
        kind, _, file = name.partition("/")
        if kind == "tables":
            old, new = load_file(base / name), load_file(whole / name)
            changed = _changed(old, new, tolerance)
            rows, changed_rows = rows + len(new["first_order"]), changed_rows + len(changed)
            values = {key: tensor[changed].contiguous() for key, tensor in new.items()}
            size = torch.tensor(len(new["first_order"]))
            tables[name] = f"changes/{file}"
            save({**values, "rows": changed, "size": size}, delta / tables[name])
        elif kind == "vocabularies":
            old, new = (pl.read_parquet(one / name)["value"] for one in (base, whole))
            lines = _changed_lines(old, new)
            changed_ids, sizes[name] = changed_ids + len(lines), len(new)
            vocabularies[name] = f"changes/{file}"
            save(lines, delta / vocabularies[name])
        elif not name.endswith(".py"):
            shutil.copyfile(whole / name, delta / name)
    about = {
        "format": update.FORMAT,
        "base": update.package_digest(base),
        "tables": tables,
        "vocabularies": vocabularies,
        "sizes": sizes,
    }
    (delta / update.DELTA).write_text(to_json(about, indent=1), encoding="utf-8")
    shutil.copyfile(whole / PACKAGE, delta / PACKAGE)
    return Delta(rows, changed_rows, changed_ids)


def _changed(old: dict[str, Tensor], new: dict[str, Tensor], tolerance: float) -> Tensor:
    """Rows of a table that moved by more than a tolerance or are new, `[n]` int64."""
    size, common = len(new["first_order"]), min(len(new["first_order"]), len(old["first_order"]))
    moved = torch.ones(size, dtype=torch.bool)
    if tolerance:
        then, now = (update.load.looked_up(table, slice(common)) for table in (old, new))
        moved[:common] = (now - then).abs().amax(1) > tolerance
        return moved.nonzero().squeeze(1)
    moved[:common] = False
    for name, tensor in new.items():
        # Bits, as minus zero equals zero.
        bits = [t[:common].contiguous().view(torch.uint8) for t in (old[name], tensor)]
        moved[:common] |= (bits[0] != bits[1]).view(common, -1).any(1)
    return moved.nonzero().squeeze(1)


def _changed_lines(old: pl.Series, new: pl.Series) -> pl.DataFrame:
    """Lines of a vocabulary that are new or hold a new id."""
    lines = new.to_frame().with_row_index("line")
    then = pl.concat([old, pl.Series("value", [None] * max(0, len(new) - len(old)), pl.String)])
    return lines.filter(then.head(len(new)).ne_missing(new))
