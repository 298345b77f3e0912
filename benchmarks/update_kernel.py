"""The update of tables alone: ours against FBGEMM's fused EXACT_ADAGRAD and plain PyTorch.

26 tables, 2.6 million ids, 12 columns, the same ids and gradients for all. First the backward pass
of one lookup with `rows: touched`. Then whole steps, forward, backward and the last flush together:
of `rows: touched`; of `rows: all` with waiting rows; and with a sweep of all rows in each step.
Where sweeping becomes cheaper, and so `ROWS_A_TOUCHED_ROW`, is found with several numbers of ids.

    python benchmarks/update_kernel.py
    python benchmarks/update_kernel.py --ids 100000 --out /tmp/100000.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from clicks import FIELDS, IDS, cardinalities, drawn_ids
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from report import Report, command_line, markdown, wrapped
from timing import interleaved, seconds_of
from torch import nn
from tqdm import tqdm

from stampede.optim import CowClip, native
from stampede.optim.update_settings import UpdateSettings
from support.updated_tables import Tables, computed, of_rows

DIM, CLIPPED = 12, 10

# Steps of a window by batch size, as many as in an epoch of `end_to_end.py`.
STEPS, QUICK = {1024: 512, 8192: 256, 65536: 32}, {1024: 8, 8192: 8}


def update_kernel(options: argparse.Namespace, report: Report) -> str:
    """The backward pass of a lookup, and whole steps, by batch size."""
    if not native.available():
        sys.exit("error: the CPU kernels cannot be compiled here: a C++17 compiler must be in PATH")
    steps, ids = (QUICK, 200_000) if options.quick else (STEPS, options.ids)
    sizes, backward, windows = cardinalities(ids), {}, {}
    for batch in tqdm(steps, desc="update", unit="batch size", ncols=100):
        backward[str(batch)] = measure_backward(batch, sizes, 3 if options.quick else 15)
        windows[str(batch)] = measure_steps(batch, sizes, steps[batch], 1 if options.quick else 3)
        found = {"backward": backward, "all_rows": windows}
        report.add(columns=DIM, ids=ids, fields=FIELDS, **found)
    return tables(report.found)


class Lookups:
    """Ids and gradients of several batches.

    Args:
        batch: samples of each.
        sizes: rows of each table.
        count: how many batches.
    """

    def __init__(self, batch: int, sizes: list[int], count: int) -> None:
        ids = drawn_ids(np.random.default_rng(0), batch * count, sizes)
        self.ids = [
            torch.from_numpy(part.T.astype(np.int64).ravel()) for part in np.split(ids, count)
        ]
        self.offsets = torch.arange(batch * len(sizes) + 1)
        draw = torch.Generator().manual_seed(0)
        self.grad = torch.randn(batch, len(sizes) * DIM, generator=draw) / batch
        self.distinct = sum(len(np.unique(column)) for column in ids[:batch].T)


def ours(sizes: list[int], rows: str) -> nn.Module:
    """Tables updated in their backward by CowClip with Adam."""
    settings = UpdateSettings(l2=1e-5, clip=CowClip(columns=CLIPPED), rows=rows)
    features = list(range(len(sizes)))
    return _filled(Tables(of_rows(*sizes), [DIM] * len(sizes), features, setting=settings).tbe)


def fbgemms(sizes: list[int]) -> nn.Module:
    """Tables updated by FBGEMM's fused Adagrad."""
    specs = [(size, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in sizes]
    return _filled(
        SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=1e-4, eps=1e-8
        )
    )


def _filled(tables: SplitTableBatchedEmbeddingBagsCodegen) -> nn.Module:
    draw = torch.Generator().manual_seed(1)
    for weights in tables.split_embedding_weights():
        weights.normal_(0.0, 1e-2, generator=draw)
    return tables


def measure_backward(batch: int, sizes: list[int], repeats: int) -> dict:
    """Seconds of the backward pass without the forward before it."""
    lookups = Lookups(batch, sizes, repeats + 1)
    with computed("torch"):
        run_torch = backwards(ours(sizes, "touched"), lookups)

    def in_torch() -> float:
        with computed("torch"):
            return run_torch()

    contenders = {
        "fbgemm": backwards(fbgemms(sizes), lookups),
        "stampede": backwards(ours(sizes, "touched"), lookups),
        "torch": in_torch,
    }
    seconds = interleaved(contenders, repeats)
    return {
        "distinct_ids": lookups.distinct,
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "all_seconds": seconds,
    }


def backwards(tables: nn.Module, lookups: Lookups) -> Callable[[], float]:
    """A function that returns the seconds of the next batch's backward."""
    batches = cycle(lookups.ids)

    def run() -> float:
        out = tables(next(batches), lookups.offsets)
        return seconds_of(lambda: out.backward(lookups.grad))

    return run


def measure_steps(batch: int, sizes: list[int], steps: int, repeats: int) -> dict:
    """Seconds a step, forward and backward, over windows that end with a flush of all rows."""
    lookups = Lookups(batch, sizes, min(steps, 64))
    contenders = {"touched": window(ours(sizes, "touched"), lookups, steps)}
    contenders["deferred"] = window(ours(sizes, "all"), lookups, steps)
    with computed("kernels"):
        contenders["swept"] = window(ours(sizes, "all"), lookups, steps)
    seconds = interleaved(contenders, repeats)
    each = {name: statistics.median(taken) / steps for name, taken in seconds.items()}
    return {"steps": steps, "seconds_per_step": each, "all_seconds": seconds}


def window(tables: nn.Module, lookups: Lookups, steps: int) -> Callable[[], float]:
    """A function that returns the seconds of `steps` steps and the final flush."""

    def run() -> None:
        for step in range(steps):
            out = tables(lookups.ids[step % len(lookups.ids)], lookups.offsets)
            out.backward(lookups.grad)
        tables.flush()

    return lambda: seconds_of(run)


def tables(found: dict) -> str:
    """The results as Markdown."""
    rows = []
    for batch, one in found["backward"].items():
        fbgemm, mine, plain = (one["seconds"][name] for name in ("fbgemm", "stampede", "torch"))
        steps = found["all_rows"][batch]["seconds_per_step"]
        row = [f"{int(batch):,}", f"{one['distinct_ids']:,}", f"{1e3 * fbgemm:.1f}"]
        row += [f"{1e3 * mine:.1f}", f"{mine / fbgemm:.2f}", f"{1e3 * plain:.1f}"]
        rows.append([*row, *(f"{1e3 * steps[n]:.1f}" for n in ("touched", "deferred", "swept"))])
    heads = ["batch", "distinct ids", "FBGEMM", "ours", "ratio", "plain PyTorch"]
    heads += ["`touched`", "`all`", "`all`, swept"]
    said = (
        "The update of the tables alone, in milliseconds. FBGEMM (its fused Adagrad), ours and "
        "plain PyTorch: the backward pass of a lookup, only rows of the batch. The last three "
        "columns: forward and backward of our step with the last flush, by `rows`; `all`, swept is "
        "`all` with a sweep of all rows in every step."
    )
    return f"{wrapped(said)}\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=IDS, help="rows of all tables together")
    command_line(update_kernel, parser=parser)
