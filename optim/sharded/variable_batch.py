"""Batches in which features have different batch sizes (TorchRec's VBE)."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@torch.compiler.disable(reason="bags are repeated outside compiled graphs")
def repeat_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Give every feature one bag for each sample of the batch.

    A bag of such a batch stands for all samples whose inverse index names it. TorchRec sends each
    bag once, and the rank that owns its rows does not learn for how many samples, which the counts
    of ids are about. So the bags are repeated before they are sent.

    Raises:
        ValueError: the batch does not tell the bag of each sample.
    """
    keys, (names, inverse) = features.keys(), features.inverse_indices_or_none() or ([], None)
    missing = [key for key in keys if key not in names]
    if missing:
        raise ValueError(
            f"tables with CowClip: feature {missing[0]!r} has a batch size of its own, but no row "
            "in the inverse_indices of the KeyedJaggedTensor, which tell the bag of each sample; "
            "give them, or give every feature the same batch size"
        )
    inverse = inverse[[names.index(key) for key in keys]]
    sizes = torch.tensor(features.stride_per_key())
    first_bags = (sizes.cumsum(0) - sizes).to(inverse.device)
    bags = (inverse + first_bags[:, None]).flatten()
    lengths = features.lengths()[bags]
    ends = lengths.cumsum(0)
    # Where in the old batch each bag begins, less where it begins in the new one.
    shift = features.offsets()[bags] - (ends - lengths)
    ids = int(ends[-1]) if len(ends) else 0
    places = torch.arange(ids, device=shift.device) + shift.repeat_interleave(lengths)
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys,
        features.values()[places],
        None if weights is None else weights[places],
        lengths=lengths,
        stride=inverse.shape[1],
    )
