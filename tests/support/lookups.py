"""Lookups of any shape for the Triton kernels, with their gradients by row in float64."""

import torch
from hypothesis import strategies as st
from torch.nn import functional

from stampede.optim.lookup import Lookup
from stampede.optim.triton import BlockSizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# So small that a handful of ids fill several programs and windows.
SMALL = {
    "window": 4, "together": 2, "window_warps": 1, "runs": 2, "unroll": 2, "run_warps": 1,
    "rows": 2, "row_warps": 1, "elements": 32, "element_warps": 1,
}  # fmt: skip


def small_blocks(dim):
    return BlockSizes(columns=1 << (dim - 1).bit_length(), **SMALL)


def random_lookup(
    *,
    sizes=(7, 5),
    tables=(0, 1),
    batch=5,
    longest=3,
    pooled=True,
    mean=False,
    weighted=False,
    dtype=torch.int64,
    hot=None,
    seed=0,
    device=DEVICE,
):
    """A lookup of `len(tables)` features.

    Args:
        sizes: rows of each table.
        tables: the table of each feature.
        longest: most ids of a bag.
        hot: an id that is added to every bag of the first feature.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(tables), batch), generator=draw)
    ids = []
    for feature, table in enumerate(tables):
        for sample in range(batch):
            number = int(lengths[feature, sample])
            bag = torch.randint(0, sizes[table], (number,), generator=draw)
            if hot is not None and feature == 0:
                bag = torch.cat([bag, torch.tensor([hot])])
            ids.append(bag)
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    indices = torch.cat(ids)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    weights = torch.rand(len(indices), generator=draw) + 0.5 if weighted else None
    return Lookup(
        indices.to(device, dtype),
        offsets.to(device, dtype),
        starts[list(tables)].to(device),
        sum(sizes),
        pooled,
        mean and pooled,
        weights.to(device) if weighted and pooled else None,
    )


def random_gradient(lookup, dim, scale=1.0):
    """Of the lookup's output."""
    draw = torch.Generator().manual_seed(1)
    shape = (lookup.batch, lookup.features * dim) if lookup.pooled else (lookup.occurrences, dim)
    return (torch.randn(shape, generator=draw) * scale).to(lookup.indices.device)


def dense(lookup, grad, dim):
    """Gradient `[rows, dim]` in float64, by torch's own bags, and counts `[rows]`."""
    offsets, firsts = lookup.offsets.cpu().long(), lookup.first_rows.cpu()
    lengths = offsets.diff()
    rows = lookup.indices.cpu() + firsts.repeat_interleave(lookup.batch).repeat_interleave(lengths)
    table = torch.zeros(lookup.rows, dim, dtype=torch.float64, requires_grad=True)
    if lookup.pooled:
        share = torch.ones(len(rows), dtype=torch.float64)
        if lookup.per_sample_weights is not None:
            share = lookup.per_sample_weights.cpu().double()
        if lookup.mean:
            share = share / lengths.repeat_interleave(lengths)
        bags = functional.embedding_bag(
            rows, table, offsets, mode="sum", per_sample_weights=share, include_last_offset=True
        )
        found = torch.cat(bags.split(lookup.batch), dim=1)
    else:
        found = table[rows]
    found.backward(grad.cpu().double())
    return table.grad, rows.bincount(minlength=lookup.rows)


@st.composite
def lookups(draw, device=DEVICE, rows=9):
    sizes = draw(st.lists(st.integers(1, rows), min_size=1, max_size=3))
    tables = sorted(draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)))
    return random_lookup(
        sizes=sizes,
        tables=tables,
        batch=draw(st.integers(1, 7)),
        longest=draw(st.integers(0, 3)),
        pooled=draw(st.booleans()),
        mean=draw(st.booleans()),
        weighted=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        hot=draw(st.sampled_from([None, 0])),
        seed=draw(st.integers(0, 2**31)),
        device=device,
    )
