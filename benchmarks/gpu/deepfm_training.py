"""Training of DeepFM on clicks in device memory, and upper bounds of the device."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from clicks import cardinalities
from clock import device_seconds, kernel_times, seconds_until_done
from floors import FLOPS, WIDTHS
from job import deepfm
from resident_clicks import ResidentClicks
from torch import Tensor
from torch._dynamo.utils import counters

from stampede.data import Batch, GlobalBatches, Order
from stampede.engine.job import Job
from stampede.engine.processes import Processes, processes
from stampede.engine.step import prefetch, train_step
from stampede.optim import local_cowclip_tables
from stampede.optim.waiting_rows import WINDOW

IDS, BATCHES = 33_800_000, (8192, 32768, 131072, 524288)
# The paper's training: 10 epochs of nine tenths of Criteo Kaggle.
PAPER_SAMPLES = 413e6
STEPS, WARM_UP = 500, 20
# Precision, which rows take a step, and whether the network is compiled; CUDA graphs on GPUs only.
KINDS = (
    ("tf32", "all", "none"),
    ("tf32", "touched", "none"),
    ("bf16", "all", "none"),
    ("bf16", "touched", "none"),
    ("bf16", "all", "default"),
    ("bf16", "all", "cuda_graphs"),
)
FLOAT = 4


def measure(device: torch.device, quick: bool = False) -> Iterator[dict]:
    """Samples a second by batch size, precision and rows, with floors of the same run.

    A window of steps ends with a flush of all rows, which counts. `share_of_gemm` is the share of a
    step that the MLP's matrix products would take at the measured rate; `share_of_copy` is the same
    for the bytes that lookup and update must move, at the measured bandwidth. `failed` lists failed
    compilations. Yielded as it grows.
    """
    sizes = cardinalities(20_000 if quick else IDS)
    batches, steps, rows = ((256,), 3, 2048) if quick else (BATCHES, STEPS, 1 << 25)
    floors = _floors(device, quick)
    found: dict = {"floors": floors, "ids": sum(sizes), "runs": [], "failed": []}
    with processes(device.type) as here:
        clicks = ResidentClicks(rows, sizes, device)
        kinds = [kind for kind in KINDS if kind[2] != "cuda_graphs" or here.device.type == "cuda"]
        for precision, rows_moved, compilation in kinds:
            # torch limits the number of compiled sizes.
            torch._dynamo.reset()
            counters.clear()
            job = deepfm(
                sizes, here.device, precision=precision, rows=rows_moved, compilation=compilation
            )
            for batch in batches:
                kind = {"precision": precision, "rows": rows_moved, "compile": compilation}
                try:
                    run = kind | _run(job, clicks, batch, steps, here)
                except Exception as failure:
                    if compilation == "none":
                        raise
                    # Continue without a kind that cannot be compiled.
                    found["failed"].append(kind | {"batch": batch, "why": repr(failure)[:500]})
                    print(found["failed"][-1], flush=True)
                    yield found
                    break
                found["runs"].append(run | _shares(run, batch, precision, floors, sum(sizes)))
                print(_line(found["runs"][-1]), flush=True)
                yield found
            # The job's hooks form a reference cycle.
            del job
            gc.collect()


def _run(
    job: Job, clicks: ResidentClicks, batch: int, steps: int, here: Processes
) -> dict[str, Any]:
    fields = list(job.front.fields)
    order = Order(clicks.rows, "global", 0, 0)
    batches = GlobalBatches(clicks, fields, batch, 0, 1, order)
    source = prefetch(_endless(batches), job.front, here.device)
    number = 0

    def train(count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            train_step(job, next(source), number, here)
        for tables in local_cowclip_tables(job.model):
            tables.flush()

    if here.device.type == "cuda":
        # Exclude memory of earlier runs, but include graphs recorded now.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(min(WARM_UP, steps))
    for tables in local_cowclip_tables(job.model):
        tables.row_counts.zero_()
    seconds = seconds_until_done(lambda: train(steps), here.device)
    touched = sum(int(t.row_counts[0]) for t in local_cowclip_tables(job.model)) / steps
    speed = steps * batch / seconds
    found = {
        "batch": batch,
        "steps": steps,
        "samples_per_second": speed,
        "seconds_for_413_million": PAPER_SAMPLES / speed,
        "distinct_rows_a_step": touched,
        # Of the network, one for each batch size so far; 0 if not compiled.
        "compiled_graphs": counters["stats"]["unique_graphs"],
    }
    if here.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _endless(batches: GlobalBatches) -> Iterator[Batch]:
    while True:
        yield from batches


def _floors(device: torch.device, quick: bool) -> dict:
    """Bytes a second of a copy, read and written; operations a second of the MLP's products."""
    size, samples = (1 << 24, 64) if quick else (1 << 32, 131072)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    seconds = statistics.median(device_seconds([copy] * 6, device)[1:])
    found = {"copy_bytes_per_second": 2 * size / seconds, "gemm_flops": {}}
    # Products are faster if rows begin at multiples of 16 bytes.
    widths = [(-(-before // 8) * 8, -(-after // 8) * 8) for before, after in WIDTHS]
    for precision, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        like = {"device": device, "dtype": dtype}
        pairs = [(torch.randn(samples, a, **like), torch.randn(a, b, **like)) for a, b in widths]
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        call = partial(_multiply, pairs)
        taken = statistics.median(device_seconds([call] * 30, device)[10:])
        torch.set_float32_matmul_precision(allowed)
        found["gemm_flops"][precision] = samples * FLOPS / taken
    return found


def _multiply(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for a, b in pairs:
        a @ b


def _shares(run: dict, batch: int, precision: str, floors: dict, ids: int) -> dict[str, float]:
    step = batch / run["samples_per_second"]
    # Backward has two products for each product of forward.
    products = 3 * batch * FLOPS / floors["gemm_flops"][precision]
    row = 12 * FLOAT
    lookups = 26 * batch
    # Lookup reads an id and a row and writes the row; its gradient is written and read. The update
    # reads and writes weights and two moments of each distinct row, and of the rows brought up to
    # date.
    waiting = ids / WINDOW if run["rows"] == "all" else 0
    moved = lookups * (8 + 4 * row) + (run["distinct_rows_a_step"] + waiting) * 6 * row
    copies = moved / floors["copy_bytes_per_second"]
    return {"share_of_gemm": products / step, "share_of_copy": copies / step}


def _line(run: dict) -> str:
    return (
        f"{run['precision']} rows {run['rows']:<7} compile {run['compile']:<11} "
        f"batch {run['batch']:>7,}: "
        f"{run['samples_per_second'] / 1e6:8.2f} M samples/s, 413 M in "
        f"{run['seconds_for_413_million']:7.1f} s"
    )


def profile(device: torch.device, quick: bool = False) -> Iterator[list[dict]]:
    """The kernels that take the most time: name, calls and microseconds a step."""
    sizes = cardinalities(20_000 if quick else IDS)
    batch, steps, warm_up = (256, 2, 1) if quick else (131072, 20, 10)
    with processes(device.type) as here:
        clicks = ResidentClicks((steps + warm_up + 1) * batch, sizes, device)
        job = deepfm(sizes, here.device, precision="bf16")
        batches = GlobalBatches(clicks, list(job.front.fields), batch, 0, 1, Order(clicks.rows))
        source = prefetch(batches, job.front, here.device)
        numbers = count(1)

        def step() -> None:
            train_step(job, next(source), next(numbers), here)

        for _ in range(warm_up):
            step()
        kernels = kernel_times([step] * steps, here.device)
    table = [
        {
            "name": name[:100],
            "calls_a_step": calls / steps,
            "microseconds_a_step": 1e6 * seconds / steps,
        }
        for name, calls, seconds in kernels[:30]
    ]
    for row in table[:12]:
        print(f"{row['microseconds_a_step']:>10.0f} us  {row['name'][:80]}", flush=True)
    yield table
