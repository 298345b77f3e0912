"""The dense part of a model as a program of `torch.export`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from stampede.engine.errors import RunFolderError
from stampede.models import CTRModel

# Any number of samples will do, also one. More than one here: torch.export takes a one for fixed.
_SAMPLES = 4


class DensePart(nn.Module):
    """From looked-up rows and numbers to logits.

    Args:
        model: its tables are taken out.
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
    """A program that needs torch only, for any number of samples.

    Args:
        model: with trained dense layers, on the CPU and in evaluation mode; its tables are taken
            out.

    Raises:
        RunFolderError: torch cannot export it, as a user's own network may be written.
    """
    fields, columns = len(model.front.fields), model.front.columns.dim + 1
    inputs = (torch.zeros(_SAMPLES, fields, columns), torch.zeros(_SAMPLES, model.numbers))
    samples = Dim("samples", min=1)
    shapes = {"rows": {0: samples}, "numbers": {0: samples}}
    try:
        with torch.no_grad():
            # Without `strict`, `len(embeddings)` in a network would be taken for fixed.
            return torch.export.export(DensePart(model), inputs, dynamic_shapes=shapes, strict=True)
    except Exception as failure:
        reason = ": ".join([type(failure).__name__, *str(failure).strip().splitlines()[:1]])
        raise RunFolderError(
            f"torch.export cannot export the network {type(model.network).__name__}: {reason}; its "
            "forward must not decide by values of tensors"
        ) from failure
