"""Whether the Triton kernels compute on this GPU what plain PyTorch computes there in float64."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional

from stampede.native_library import cache_folder
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.lookup import Lookup, runs_from_sort
from stampede.optim.rows import RowGradients
from stampede.optim.rules import step_constants
from stampede.optim.table_array import Measured, PendingUpdate, TableArray
from stampede.optim.triton import RowSums, steps, sum_runs
from stampede.optim.waiting_rows import is_replayable

_LOG = logging.getLogger("stampede.optim")

# Largest difference from float64, as a share of the largest value of the same row.
TOLERANCE = 1e-5
# Of the table that is tried; the first steps that its rows may miss, and the learning rate.
ROWS, FIRST, NOW, LR = 64, 3, 9, 1e-2

# What is compared, and its values by the kernel and in float64.
_Comparison = Callable[[], Iterator[tuple[str, Tensor, Tensor]]]


def why_not_trusted(array: TableArray, *, pooled: bool, mean: bool) -> str | None:
    """Try the kernels on a few rows like those of an array; a sentence names one that is wrong.

    Each kernel is tried that lookup and update of the array use, with rows that are clipped and
    that are not, that are in the batch and that wait, and with ids that repeat within and beyond a
    window. This takes seconds, most of them to compile kernels that the first step needs anyway.
    What was right once is not tried again with the same GPU, driver, libraries and sources.

    Args:
        array: one that `why_not` accepts.
        pooled, mean: of its lookups.

    Raises:
        RuntimeError: the GPU cannot be used any more after a kernel has failed.
    """
    device = array.weights.device
    passed = cache_folder() / f"kernels-{_key(array, pooled, mean)}"
    if passed.exists():
        return None
    began = time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    for kernel, compare in comparisons(array, pooled, mean):
        try:
            for what, found, exact in compare():
                error = largest_error(found, exact)
                # A comparison with NaN is false.
                if not error <= TOLERANCE:
                    return f"on {name} {kernel} computes wrong {what} (off by {error:.1e})"
        except Exception as failure:  # Whatever compiler and driver may raise.
            _LOG.debug("%s", kernel, exc_info=True)
            reason = (str(failure).strip().splitlines() or [""])[-1].strip()
            said = f"on {name} {kernel} fails ({type(failure).__name__}: {reason:.200})"
            if not _still_works(device):
                raise RuntimeError(
                    f"{said}, and this process cannot use the GPU any more; start again with "
                    "run.kernels=torch, or cowclip_sharders(kernels='torch')"
                ) from failure
            return said
    _LOG.info("checked the Triton kernels in %.1f s", time.perf_counter() - began)
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError as failure:
        _LOG.info("the next run checks the Triton kernels again: %s", failure)
    return None


def _still_works(device: torch.device) -> bool:
    try:
        return torch.ones(1, device=device).item() == 1
    except Exception:  # After an invalid access every call fails, with errors of several types.
        return False


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Largest difference from the exact values as a share of the largest value of the row."""
    found, exact = (t.double().reshape(len(t), -1) for t in (found, exact))
    largest = exact.abs().amax(1, keepdim=True)
    error = (found - exact).abs() / torch.where(largest == 0, 1.0, largest)
    # `amax` of a NaN is NaN.
    return error.amax().item()


def _key(array: TableArray, pooled: bool, mean: bool) -> str:
    """A hash of everything that the result depends on."""
    import fbgemm_gpu

    parts = [torch.__version__, triton.__version__, fbgemm_gpu.__version__, pooled, mean]
    device = array.weights.device
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
        parts.append(torch._C._cuda_getDriverVersion())
        driver = Path("/proc/driver/nvidia/version")
        parts.append(driver.read_text() if driver.exists() else "")
    parts += [array.weights.shape[1], array.width, array.local_width, array.counts_rows]
    parts.append(array.settings)
    here = Path(__file__).parent
    for folder in (here, here.parent, here.parent / "backends"):
        parts += [file.read_text() for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def comparisons(array: TableArray, pooled: bool, mean: bool) -> Iterator[tuple[str, _Comparison]]:
    """The kernels that lookup and update of an array use, each after those whose results it takes.

    Random numbers are drawn on the CPU, so that they are the same everywhere.
    """
    lookup = _lookup(array, pooled, mean)
    # The factors of a mean are weights, too.
    lookups = [lookup]
    if pooled and not mean:
        weights = torch.rand(lookup.occurrences, generator=_draw()) + 0.5
        lookups.append(replace(lookup, per_sample_weights=weights.to(lookup.indices.device)))
    # So small that the L2 term counts.
    scale = array.settings.l2 or 1.0
    for tried in lookups:
        samples = tried.batch if pooled else tried.occurrences
        grad = torch.randn(samples, _dim(array), generator=_draw()) * scale
        given = array, tried, grad.to(array.weights.device)
        yield "FBGEMM's sort of the ids", partial(_sorts, tried)
        yield "the Triton kernel _sum_windows", partial(_sums_windows, *given)
        yield "the Triton kernel _join_windows", partial(_joins_windows, *given)
        yield "the Triton kernel _sum_runs", partial(_sums_runs, *given)
    yield "the Triton kernel _update_rows", partial(_updates_rows, array, lookup)
    if is_replayable(array.settings):
        yield "the Triton kernel _replay", partial(_replays_range, array)
        yield "the Triton kernel _replay of listed rows", partial(_replays_listed, array)
        yield "the Triton kernel _mark_rows", partial(_marks_listed, array)


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _dim(array: TableArray) -> int:
    return array.weights.shape[1]


def _small(array: TableArray, dtype: torch.dtype = torch.float32) -> TableArray:
    """A table of `ROWS` rows whose state is that of some steps; every other row is new."""
    draw, dim, device = _draw(), _dim(array), array.weights.device
    scale = 10.0 ** -torch.randint(0, 3, (ROWS, 1), generator=draw)
    weights = torch.randn(ROWS, dim, generator=draw) * scale
    # A row of zeros has no norm for a threshold.
    weights[0] = 0.0
    moments = torch.randn(2, ROWS, dim, generator=draw) * 1e-3
    moments[:, ::2] = 0.0
    weights, first, second = (
        t.to(device, dtype) for t in (weights, moments[0], moments[1].square())
    )
    shard = replace(array.shards[0], rows=ROWS, row_offset=0)
    return replace(
        array,
        shards=(shard,),
        weights=weights,
        states={"exp_avg": first, "exp_avg_sq": second},
    )


def _lookup(array: TableArray, pooled: bool, mean: bool) -> Lookup:
    """Two ids a sample; one id fills several windows, some rows repeat, some are left out."""
    device, draw = array.weights.device, _draw()
    window = sum_runs.block_sizes(_dim(array), 0).window
    often = 3 * window + window // 2
    # A multiple of 16: Triton compiles sizes that are not separately.
    number = -(-(often + ROWS) // 16) * 16
    ids = torch.full((number,), 3)
    ids[often:] = torch.randint(0, ROWS, (number - often,), generator=draw)
    ids = ids[torch.randperm(number, generator=draw)]
    offsets = torch.arange(0, number + 1, 2 if pooled else 1)
    return Lookup(
        ids.to(device), offsets.to(device), torch.zeros(1, dtype=torch.int64, device=device), ROWS,
        pooled, mean,
    )  # fmt: skip


def _sorts(lookup: Lookup) -> Iterator[tuple[str, Tensor, Tensor]]:
    found, exact = lookup.runs, runs_from_sort(lookup)
    number = int(exact.count)
    yield "counts", found.count, exact.count
    yield "rows", found.rows[:number], exact.rows[:number]
    yield "starts", found.starts[: number + 1], exact.starts[: number + 1]
    for what in ("ordered", "source"):
        yield what, getattr(found, what), getattr(exact, what)
    if exact.coefficient is not None:
        yield "weights", found.coefficient, exact.coefficient


def _sums_windows(
    array: TableArray, lookup: Lookup, grad: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    of_one, _, exact = _exact_windows(array, lookup, grad)
    yield "sums", sum_runs.sum_windows(lookup.runs, grad)[0][of_one], exact


def _joins_windows(
    array: TableArray, lookup: Lookup, grad: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    of_one, rows, exact = _exact_windows(array, lookup, grad)
    _, run = torch.unique_consecutive(rows, return_inverse=True)
    total = exact.new_zeros(int(run.max()) + 1, _dim(array)).index_add_(0, run, exact)
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = run[1:] != run[:-1]
    found = sum_runs.sum_windows(lookup.runs, grad)[1][of_one]
    yield "sums", found[is_first], total


def _exact_windows(
    array: TableArray, lookup: Lookup, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Which windows are of one row, their rows, and their sums."""
    runs, window = lookup.runs, sum_runs.block_sizes(_dim(array), lookup.occurrences).window
    each = grad.double()[runs.source.long()]
    if runs.coefficient is not None:
        each = each * runs.coefficient[:, None]
    number = len(each) // window
    ordered = runs.ordered[: number * window].view(number, window)
    of_one = ordered[:, 0] == ordered[:, -1]
    exact = each[: number * window].view(number, window, -1).sum(1)
    return of_one, ordered[of_one, 0], exact[of_one]


def _sums_runs(
    array: TableArray, lookup: Lookup, grad: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    nonfinite = torch.zeros(1, dtype=torch.int32, device=grad.device)
    found = sum_runs.sum_runs(lookup.runs, grad, _small(array), nonfinite)
    reference = TorchBackend(_small(array, torch.float64))
    batch = reference.sum_by_row(lookup, grad.double())
    measured = reference.measure(PendingUpdate(reference, batch, LR, FIRST))
    grads, squares = measured.update.batch.grads, measured.values
    yield "gradients", found.grads[: len(grads)], grads
    yield "norms", found.squares[:, : len(grads)].flatten(), squares.flatten()
    yield "number of bad rows", nonfinite, torch.zeros_like(nonfinite)
    poisoned = torch.full_like(grad, torch.inf)
    sum_runs.sum_runs(lookup.runs, poisoned, _small(array), nonfinite)
    yield "number of bad rows", nonfinite, torch.full_like(nonfinite, len(grads))


def _updates_rows(array: TableArray, lookup: Lookup) -> Iterator[tuple[str, Tensor, Tensor]]:
    small, exact = _small(array), _small(array, torch.float64)
    settings, clip, step = array.settings, array.settings.clip, FIRST + 1
    runs = lookup.runs
    number, clipped = int(runs.count), array.local_width
    rows, counts = runs.rows[:number], runs.starts.diff()[:number].long()
    grads = torch.randn(number, _dim(array), generator=_draw()).to(exact.weights)
    of_weights = exact.weights[rows, :clipped].square().sum(1)
    if clip.clips:
        # Each row's norm is either ten times or a tenth of its threshold.
        threshold = clip.largest_norm(of_weights.sqrt(), counts, array.width)
        times = torch.where(torch.arange(number, device=rows.device) % 4 < 2, 10.0, 0.1)
        grads *= (times * threshold / grads[:, :clipped].norm(dim=1))[:, None]
    grads = grads.float().double()
    squares = grads.square()
    values = torch.stack([squares[:, :clipped].sum(1), squares[:, clipped:].sum(1), of_weights])
    factor = clip.factor(values[0], values[2], counts, array.width) if clip.clips else None
    expected = [number, 0 if factor is None else int((factor < 1).sum()), 0]

    room = runs.capacity - number
    sums = RowSums(
        functional.pad(grads.float(), (0, 0, 0, room)).contiguous(),
        functional.pad(values.float(), (0, room)).contiguous(),
    )
    row_counts = torch.zeros(3, dtype=torch.int64, device=rows.device)
    last = torch.zeros(ROWS, dtype=torch.int32, device=rows.device)
    waits = is_replayable(settings)
    steps.update_rows_(
        small,
        runs,
        sums,
        constants=step_constants(settings.rule, LR, step, settings.weight_decay),
        nonfinite=torch.zeros(1, dtype=torch.int32, device=rows.device),
        row_counts=row_counts,
        last=last if waits else None,
        step=step,
    )
    _step(exact, RowGradients(rows, grads, counts), values, LR, step)
    for what, one, other in _named(small, exact):
        yield what, one[rows], other[rows]
    yield "counts", row_counts, row_counts.new_tensor(expected) * array.counts_rows
    others = torch.ones(ROWS, dtype=torch.bool, device=rows.device)
    others[rows] = False
    for what, one, other in _named(small, _small(array)):
        yield f"{what} of other rows", one[others], other[others]
    yield "steps of rows", last, (~others).int() * (step if waits else 0)


def _replays_range(array: TableArray) -> Iterator[tuple[str, Tensor, Tensor]]:
    small, last, missed = _waiting(array)
    first, stop = 5, ROWS - 3
    steps.catch_up_range_((*small.adam_tensors(), last), first, stop, missed)
    rows = torch.arange(first, stop, device=last.device)
    yield from _named(small, _replayed(array, rows))
    yield "steps of rows", last, _reached(array, rows)


def _replays_listed(array: TableArray) -> Iterator[tuple[str, Tensor, Tensor]]:
    small, last, missed = _waiting(array)
    rows, count = _listed(last.device)
    steps.catch_up_rows_((*small.adam_tensors(), last), rows, count, missed)
    yield from _named(small, _replayed(array, rows[: int(count)]))


def _marks_listed(array: TableArray) -> Iterator[tuple[str, Tensor, Tensor]]:
    small, last, missed = _waiting(array)
    rows, count = _listed(last.device)
    steps.catch_up_rows_((*small.adam_tensors(), last), rows, count, missed)
    yield "steps of rows", last, _reached(array, rows[: int(count)])


def _listed(device: torch.device) -> tuple[Tensor, Tensor]:
    """Every third row; all but the last few of them count."""
    rows = torch.arange(0, ROWS, 3, device=device)
    return rows, torch.tensor([len(rows) - 5], dtype=torch.int32, device=device)


def _rate(step: int) -> float:
    """Learning rates change, as in a warm-up."""
    return LR * (1 + step % 3) / 3


def _waiting(array: TableArray) -> tuple[TableArray, Tensor, steps.Missed]:
    """A table, the step that each row is at, and the steps that they may have missed."""
    settings, device = array.settings, array.weights.device
    last = torch.randint(FIRST, NOW + 1, (ROWS,), generator=_draw()).int().to(device)
    # More steps than those to take.
    constants = [
        step_constants(settings.rule, _rate(step), step, settings.weight_decay)
        for step in range(FIRST + 1, NOW + 4)
    ]
    missed = steps.Missed(
        torch.tensor(constants, device=device),
        FIRST,
        NOW,
        settings.rule.betas,
        settings.l2,
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    return _small(array), last, missed


def _reached(array: TableArray, rows: Tensor) -> Tensor:
    last = _waiting(array)[1]
    last[rows] = NOW
    return last


def _replayed(array: TableArray, rows: Tensor) -> TableArray:
    """In float64 the table after some rows have taken the steps that they missed."""
    exact, last = _small(array, torch.float64), _waiting(array)[1]
    none = torch.zeros(0, dtype=torch.int64, device=last.device)
    grads = exact.weights.new_zeros(0, _dim(array))
    chosen = torch.zeros_like(last, dtype=torch.bool)
    chosen[rows] = True
    for step in range(FIRST + 1, NOW + 1):
        before = [tensor.clone() for tensor in exact.all_tensors()]
        _step(exact, RowGradients(none, grads, none), grads.new_zeros(3, 0), _rate(step), step)
        stays = ~chosen | (last >= step)
        for tensor, was in zip(exact.all_tensors(), before, strict=True):
            tensor[stays] = was[stays]
    return exact


def _step(array: TableArray, batch: RowGradients, values: Tensor, lr: float, step: int) -> None:
    """A step in plain PyTorch."""
    backend = TorchBackend(array)
    update = PendingUpdate(backend, batch._replace(grads=batch.grads.clone()), lr, step)
    backend.step_(Measured(update, values))


def _named(found: TableArray, exact: TableArray) -> Iterator[tuple[str, Tensor, Tensor]]:
    names = ("weights", "first moments", "second moments")
    yield from zip(names, found.adam_tensors(), exact.adam_tensors(), strict=True)
