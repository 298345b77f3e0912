"""The update of tables alone: ours against FBGEMM's fused EXACT_ADAGRAD and plain PyTorch.

26 tables, 2.6 million ids, 12 columns, the same ids and gradients for all. First the backward pass
of one lookup with `rows: touched`, and the share of our kernels in it. Then `rows: all` over many
steps, forward, backward and the last flush together: with waiting rows, and with a sweep of all
rows in each step.

    python benchmarks/update_kernel.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from clicks import FIELDS, IDS, cardinalities, drawn_ids
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from report import begin, markdown, wrapped
from timing import Stopwatch, interleaved, seconds_of
from torch import nn
from tqdm import tqdm

from stampede.optim import CowClip, native
from stampede.optim.backends.cpu import CpuBackend
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableShard
from support.updated_tables import Tables, computed

DIM, CLIPPED = 12, 10
BATCHES = (1024, 8192, 65536)

# Steps of a window of `rows: all`, as many as in an epoch of `end_to_end.py`.
STEPS = {1024: 512, 8192: 256, 65536: 32}
# Plain PyTorch sweeps the whole table in every step, so few steps suffice.
TORCH_STEPS = 6

KERNELS = {
    "sum_by_row": "sum by row",
    "can_step_at_once": "check",
    "step_at_once_": "clip and step",
}


def main() -> None:
    options, report = begin("update_kernel", __doc__)
    if not native.available():
        sys.exit("error: the CPU kernels cannot be compiled here: a C++17 compiler must be in PATH")
    batches = BATCHES[:2] if options.quick else BATCHES
    ids = 200_000 if options.quick else IDS
    backward, all_rows = {}, {}
    for batch in tqdm(batches, desc="backward", unit="batch size", ncols=100):
        backward[str(batch)] = measure_backward(batch, ids, repeats=3 if options.quick else 15)
        report.add(columns=DIM, ids=ids, fields=FIELDS, backward=backward)
    for batch in tqdm(batches, desc="rows: all", unit="batch size", ncols=100):
        steps, repeats = (8, 1) if options.quick else (STEPS[batch], 3)
        all_rows[str(batch)] = measure_all_rows(batch, ids, steps, repeats)
        report.add(all_rows=all_rows)
    print(tables(report.found))
    report.close()


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
        distinct = [len(np.unique(column)) for column in ids[:batch].T]
        self.distinct = sum(distinct)


def ours(sizes: list[int], rows: str) -> nn.Module:
    """Tables updated in their backward by CowClip with Adam."""
    settings = UpdateSettings(l2=1e-5, clip=CowClip(columns=CLIPPED), rows=rows)
    shards = [TableShard(f"t{i}", size) for i, size in enumerate(sizes)]
    tables = Tables(shards, [DIM] * len(sizes), list(range(len(sizes))), setting=settings)
    return _filled(tables.tbe)


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


def measure_backward(batch: int, ids: int, repeats: int) -> dict:
    """Seconds of the backward pass without the forward before it."""
    sizes = cardinalities(ids)
    lookups = Lookups(batch, sizes, repeats + 1)
    mine = ours(sizes, "touched")
    watch = Stopwatch()
    parts: dict[str, list[float]] = {}

    def watched() -> float:
        with ExitStack() as stack:
            for kernel, name in KERNELS.items():
                stack.enter_context(watch.watching(CpuBackend, kernel, name))
            watch.reset()
            seconds = run_ours()
        parts_now = {**watch.seconds, "rest": seconds - sum(watch.seconds.values())}
        for name, taken in parts_now.items():
            parts.setdefault(name, []).append(taken)
        return seconds

    def in_torch() -> float:
        with computed("torch"):
            return run_torch()

    run_ours = _backwards(mine, lookups)
    with computed("torch"):
        plain = ours(sizes, "touched")
    run_torch = _backwards(plain, lookups)
    contenders = {
        "fbgemm": _backwards(fbgemms(sizes), lookups),
        "stampede": watched,
        "torch": in_torch,
    }
    seconds = interleaved(contenders, repeats)
    return {
        "distinct_ids": lookups.distinct,
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "all_seconds": seconds,
        # Leave out the first backward, a warm-up, as everywhere.
        "parts": {name: statistics.median(taken[1:]) for name, taken in parts.items()},
    }


def _backwards(tables: nn.Module, lookups: Lookups) -> Callable[[], float]:
    position = 0

    def run() -> float:
        nonlocal position
        out = tables(lookups.ids[position % len(lookups.ids)], lookups.offsets)
        position += 1
        return seconds_of(lambda: out.backward(lookups.grad))

    return run


def measure_all_rows(batch: int, ids: int, steps: int, repeats: int) -> dict:
    """Seconds a step, forward and backward, over windows that end with a flush of all rows."""
    sizes = cardinalities(ids)
    lookups = Lookups(batch, sizes, min(steps, 64))
    contenders = {"touched": window(ours(sizes, "touched"), lookups, steps)}
    contenders["deferred"] = window(ours(sizes, "all"), lookups, steps)
    with computed("kernels"):
        swept = ours(sizes, "all")
    contenders["swept"] = window(swept, lookups, steps)
    with computed("torch"):
        plain = ours(sizes, "all")
    few = min(steps, TORCH_STEPS)
    run_torch = window(plain, lookups, few)

    def in_torch() -> float:
        with computed("torch"):
            return run_torch()

    contenders["torch"] = in_torch
    seconds = interleaved(contenders, repeats)
    each = {name: few if name == "torch" else steps for name in seconds}
    return {
        "steps": steps,
        "seconds_per_step": {
            name: statistics.median(taken) / each[name] for name, taken in seconds.items()
        },
        "all_seconds": seconds,
    }


def window(tables: nn.Module, lookups: Lookups, steps: int) -> Callable[[], float]:
    """A function that returns the seconds of `steps` steps and the final flush."""

    def run() -> float:
        start = time.perf_counter()
        for step in range(steps):
            out = tables(lookups.ids[step % len(lookups.ids)], lookups.offsets)
            out.backward(lookups.grad)
        tables.flush()
        return time.perf_counter() - start

    return run


def tables(found: dict) -> str:
    """The results as Markdown."""
    rows = []
    for batch, one in found["backward"].items():
        ms = {name: 1e3 * seconds for name, seconds in one["seconds"].items()}
        step = {
            name: 1e3 * seconds
            for name, seconds in found["all_rows"][batch]["seconds_per_step"].items()
        }
        rows.append(
            [
                f"{int(batch):,}",
                f"{one['distinct_ids']:,}",
                f"{ms['fbgemm']:.1f}",
                f"{ms['stampede']:.1f}",
                f"{ms['stampede'] / ms['fbgemm']:.2f}",
                f"{ms['torch']:.1f}",
                f"{step['touched']:.1f}",
                f"{step['deferred']:.1f}",
                f"{step['swept']:.1f}",
            ]
        )
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
    main()
