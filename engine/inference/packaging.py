"""Export: a folder with everything that scoring needs, and a loader that runs without stampede."""

from __future__ import annotations

import errno
import operator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
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
from stampede.data.schema.schema import Hashed, Integers, NumberField, TimePart
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.kept import (
    check_trained_with,
    inputs_folder,
    meanings_of_rows,
    remedy,
)
from stampede.engine.inference.package.dense import ARITHMETIC, argument, find_operator
from stampede.engine.inference.package.update import PACKAGE, sealed
from stampede.engine.inference.trained import Trained, dense_model
from stampede.engine.tables import FieldWeights, read_stored_field
from stampede.files import hidden, make_folder, publish_folder, remove, to_json
from stampede.models import CTRModel

RowType = Literal["fp32", "fp16", "int8"]

_LOADER = Path(__file__).parent / "package"
_FORMAT = 2

_INT8 = 127
_CHUNK = 1 << 20

# Of the example input. Not 1: torch.export would take it for a fixed size.
_SAMPLES = 4


def export(trained: Trained, folder: Path, rows: RowType, overwrite: bool) -> None:
    """Write a package; the folder appears once it is complete.

    `package.json` describes the inputs and lists the SHA-256 of all files. `dense.json` and
    `dense.safetensors` are the dense part. `tables/` and `vocabularies/` have a file for each
    field. `load.py` is the loader.

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
        if of_field.values is not None:
            save(of_field.values().to_frame(), folder / "vocabularies" / f"{name}.parquet")
    (folder / "tables").mkdir()
    for field in tqdm(about["fields"], "exporting tables", unit=" tables", delay=1):
        name = field["name"]
        tensors = stored_rows(read_stored_field(trained.checkpoint, name), rows, name)
        save(tensors, folder / "tables" / f"{name}.safetensors")
    about = {"format": _FORMAT, **about}
    (folder / PACKAGE).write_text(sealed(about, folder), encoding="utf-8")


def described_model(
    trained: Trained, rows: RowType
) -> tuple[dict[str, Any], dict[str, RowMeanings]]:
    """The description of a model, and what the rows of its tables stand for, by field.

    The description says how the inputs are made from columns: `fields` and `numbers` in the model's
    order.

    Raises:
        RunFolderError, DataError: the run's vocabularies belong to another model, or are damaged.
    """
    data, kept = trained.data, inputs_folder(trained.config, trained.run)
    names, dtype = [f"I{i + 1}" for i in range(data.numbers)], "float32"
    if kept is not None:
        manifest = check_trained_with(kept, data, trained.checkpoint, remedy(kept))
        names, dtype = manifest.numbers, manifest.numbers_dtype
    meanings = meanings_of_rows(kept, data.vocabulary_sizes)
    # Without a schema, ids are rows and numbers are transformed already.
    numbers = {name: NumberField(transform=[]) for name in names}
    ranges, missing, time = dict.fromkeys(names, NumberRange()), [""], None
    if kept is not None and (kept / LEARNED_FOLDER).is_dir():
        saved = read_saved(kept / LEARNED_FOLDER, remedy(kept))
        schema, ranges = saved.schema_, saved.ranges
        numbers, missing = schema.numbers, schema.missing
        if any(isinstance(field, TimePart) for field in schema.ids.values()):
            time = schema.time.model_dump()
    about = {
        "stampede": metadata.version("stampede"),
        "torch": torch.__version__,
        "checkpoint": str(trained.checkpoint),
        "epoch": trained.epoch,
        "network": trained.config.model.name,
        "dim": trained.config.model.dim,
        "first_order_scale": trained.config.model.first_order_scale,
        "rows": rows,
        "fields": [_described(of_field) for of_field in meanings.values()],
        "numbers": [
            {
                "name": name,
                "column": field.column or name,
                "fill": field.fill,
                "transform": field.transform,
                **{key: getattr(ranges[name], key) for key in ("low", "high", "mean", "deviation")},
            }
            for name, field in numbers.items()
        ],
        "numbers_dtype": dtype,
        "missing": missing,
        "time": time,
    }
    return about, meanings


def _described(meanings: RowMeanings) -> dict[str, Any]:
    entry, field = meanings.entry, meanings.field
    about = {
        **entry.model_dump(),
        "column": getattr(field, "column", "") or entry.name,
        "separator": getattr(field, "separator", None),
        "max_ids": getattr(field, "max_ids", None),
        "encode": meanings.encode,
    }
    if field is None:
        about |= {"separator": "," if entry.multi else None, "size": entry.rows}
    elif isinstance(field, TimePart):
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
    if not bool(torch.isfinite(halves).all()):
        largest = values.abs().max().item()
        raise RunFolderError(
            f"field {field}: a weight of {largest:g} is too large for fp16, or not finite; write "
            "--rows fp32"
        )
    return halves


class DensePart(nn.Module):
    """From looked-up rows and numbers to logits.

    Args:
        model: its tables are removed.
    """

    def __init__(self, model: CTRModel) -> None:
        super().__init__()
        columns = model.front.columns
        self.padding = columns.stored - columns.dim - 1
        model.front.ebc = nn.Module()
        self.model = model

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Logits `[n]`.

        Args:
            rows: `[n, fields, dim + 1]`, embedding and first-order weight of each field.
            numbers: `[n, numbers]`.
        """
        return self.model.logits(functional.pad(rows, [0, self.padding]).flatten(1), numbers)


def export_dense_part(model: CTRModel) -> ExportedProgram:
    """Export the dense part as a program of torch operators, for any number of samples.

    Args:
        model: with trained dense layers, on the CPU and in evaluation mode; its tables are removed.

    Raises:
        RunFolderError: torch cannot export it; this happens with users' own networks.
    """
    fields, columns = len(model.front.fields), model.front.columns.dim + 1
    inputs = (torch.zeros(_SAMPLES, fields, columns), torch.zeros(_SAMPLES, model.numbers))
    samples = Dim("samples", min=1)
    shapes = {"rows": {0: samples}, "numbers": {0: samples}}
    try:
        with torch.no_grad():
            # Without `strict`, torch.export takes `len(embeddings)` in a network for fixed.
            return torch.export.export(DensePart(model), inputs, dynamic_shapes=shapes, strict=True)
    except Exception as failure:
        reason = ": ".join([type(failure).__name__, *str(failure).strip().splitlines()[:1]])
        raise RunFolderError(
            f"torch.export cannot export the network {type(model.network).__name__}: {reason}; its "
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
        changes_an_argument = schema is not None and schema.is_mutable
        # Skip unused results, and assertions, which return nothing.
        if node not in needed and not changes_an_argument:
            continue
        needed.update(node.all_input_nodes)
        name = str(node.target).removeprefix("aten.")
        if node.target in ARITHMETIC.values() or node.target is operator.getitem:
            name = node.target.__name__
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
