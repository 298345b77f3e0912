"""Training in float64, in which ranks and plans differ by much less than what a fault would do."""

import torch
from torch import Tensor
from torchrec.distributed import embeddingbag

from stampede.data import Batch
from stampede.engine.job import build
from stampede.models.embedding_front import EmbeddingFront, LookedUp
from stampede.models.histories import Jagged
from stampede.optim import CowClipTables


def compute_in_float64():
    """Make this process compute what it reads as float32 in float64; initial weights are the same.

    Tables are updated by the kernels in PyTorch, and layers computed by torch. All else is as ever.
    """
    Tensor.float = Tensor.double
    move_dense, split, output, to = (
        build.move_dense, CowClipTables._apply_split, CowClipTables._output, Batch.to,
    )  # fmt: skip

    def moved(model, device):
        for child in model.children():
            if child is not model.front:
                child.double()
        model.bias.data = model.bias.data.double()
        move_dense(model, device)

    def allocated(tbe, *sizes, **options):
        split(tbe, *sizes, **{**options, "dtype": torch.float64})

    def sent(batch, *arguments, **options):
        batch = to(batch, *arguments, **options)
        for name in ("dense", "label", "weight"):
            setattr(batch, name, getattr(batch, name).double())
        return batch

    def looked_up_in_float64(front, *given):
        rows, histories = looked_up(front, *given)
        doubled = {n: Jagged(one.values.double(), one.lengths) for n, one in histories.items()}
        return LookedUp(rows.double(), doubled)

    def local_in_float64(*given):
        found = local_lookup(*given)
        return found and (lambda features: found(features).double())

    local_lookup, build.local_lookup = build.local_lookup, local_in_float64
    looked_up = EmbeddingFront._looked_up
    EmbeddingFront._looked_up = looked_up_in_float64
    build.move_dense, Batch.to, CowClipTables._apply_split = moved, sent, allocated
    # FBGEMM's lookup gives float32.
    CowClipTables._is_pooled_here = lambda tbe: True
    CowClipTables._output = lambda tbe, *given: output(tbe, *given).double()
    embeddingbag.data_type_to_dtype = lambda _: torch.float64
