"""How many threads take a training step on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

from stampede.models import CTRModel
from stampede.native_library import switched_off
from stampede.optim import local_cowclip_tables

# With fewer multiply-adds in a step, one thread takes it sooner than two: these would meet some 30
# times. On a busy machine each meeting waits for the other processes (benchmarks/small_logs.py).
_FEWEST = 1 << 27
# Multiply-adds that take as long as one column of a looked-up row, with gradient and update, and
# as one column of a row that takes its step outside of the batch.
_OF_COLUMN, _OF_SWEPT = 100, 50
# Samples whose multiply-adds are counted.
_TRIED = 2


def step_threads(model: CTRModel, samples: int) -> int:
    """The threads of a training step: one if it is too small to be shared, else torch's.

    It depends on the settings alone, as the number of threads may change the last bits.

    Args:
        samples: of this rank in a batch.
    """
    threads, front = torch.get_num_threads(), model.front
    if threads == 1 or front.histories:
        return threads
    columns, training = sum(front.widths), model.training
    rows, numbers = torch.zeros(_TRIED, columns), torch.zeros(_TRIED, model.numbers)
    with torch.no_grad(), switched_off(), FlopCounterMode(display=False) as counted:
        model.eval().logits(rows, numbers)
    model.train(training)
    # Each is two operations, and the backward pass has twice as many.
    products = 3 * counted.get_total_flops() / 2 / _TRIED
    swept = sum(
        backend.array.weights.numel()
        for tables in local_cowclip_tables(model)
        for backend in tables.backends
        if backend.waiting is None and backend.array.settings.moves_untouched_rows
    )
    work = samples * (products + _OF_COLUMN * columns) + _OF_SWEPT * swept
    return threads if work >= _FEWEST else 1


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Let torch and the kernels use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
