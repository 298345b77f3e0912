"""The dense part of a model as a program of torch operators, and its description for packages."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.nn import functional

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.package.dense import ARITHMETIC, argument, find_operator
from stampede.engine.inference.package.load import together
from stampede.models import CTRModel, StoredColumns
from stampede.models.histories import history
from stampede.models.negative_sampling import corrected

# Of the example input. Not 1: torch.export would take it for a fixed size.
SAMPLES = 4


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
        places: Sequence[Tensor] = (),
    ) -> Tensor:
        """Logits `[n]`, or `[n, goals]`.

        Args:
            rows: `[n, pooled fields, dim + 1]`, embedding and first-order weight of each field; if
                fields differ in width, `[n, sum of dim + 1]`.
            numbers: `[n, numbers]`.
            values: of each history `[ids, dim + 1]`, or padded `[n, most, dim + 1]`, the same of
                each id.
            places: of each history `[n]`, the ids of each sample, or padded `[n, most]`, whether
                there is an id at a place.
        """
        read = {
            name: history(_padded(one, columns), of_samples)
            for (name, columns), one, of_samples in zip(
                self.histories.items(), values, places, strict=True
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

    Only the network's own histories are padded.

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
        [],
        [],
    )
    of_rows = {0: samples}
    shapes = {"rows": of_rows, "numbers": of_rows, "values": [], "places": []}
    for field, columns in zip(front.histories, histories, strict=True):
        if field in front.sequences:
            values = torch.zeros(SAMPLES, SAMPLES + 1, columns)
            places = torch.ones(SAMPLES, SAMPLES + 1, dtype=torch.bool)
            of_values = of_places = {0: samples, 1: Dim.DYNAMIC}
        else:
            values, places = torch.zeros(2 * SAMPLES, columns), torch.full((SAMPLES,), 2)
            of_values, of_places = {0: Dim.DYNAMIC}, of_rows
        inputs[2].append(values)
        inputs[3].append(places)
        shapes["values"].append(of_values)
        shapes["places"].append(of_places)
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
