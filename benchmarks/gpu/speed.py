"""Speed of training DeepFM on clicks in device memory, its floors, and what users would pick."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

import torch
from cases import Case
from clicks import cardinalities
from clock import device_seconds, kernel_times, seconds_until_done
from floors import FLOPS, WIDTHS
from job import TableOptimizer, deepfm
from resident_clicks import ResidentClicks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchrec.optim.optimizers import Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from stampede.data import Batch, GlobalBatches, Order
from stampede.engine.job import Job
from stampede.engine.processes import Processes, processes
from stampede.engine.step import SentBatch, _dense_pass, prefetch, train_step
from stampede.models.embedding_front import LookedUp
from stampede.optim import local_cowclip_tables
from stampede.optim.waiting_rows import WINDOW

IDS, CLICKS = 33_800_000, 1 << 24
# The paper's training: 10 epochs of nine tenths of Criteo Kaggle.
PAPER_SAMPLES = 413e6
# Steps before those that are timed: rows that wait must have waited as long as any do.
WARM_UP = WINDOW + 8
# Of a timed run, and the most and fewest steps in them.
SECONDS, MOST_STEPS, FEWEST_STEPS = 2.5, 500, 30
BATCH = 131072
FLOAT = 4
# FBGEMM's fused optimizers that a user would pick instead.
FUSED = {"fbgemm_rowwise_adagrad": RowWiseAdagrad, "fbgemm_adam": Adam}


class Setting:
    """Device, sizes and clicks of a part's cases; a job is kept until another kind is wanted."""

    def __init__(self, device: torch.device, quick: bool, stack: ExitStack) -> None:
        self.quick = quick
        self.here: Processes = stack.enter_context(processes(device.type))
        self.device = self.here.device
        self.sizes = cardinalities(20_000 if quick else IDS)
        self._clicks: ResidentClicks | None = None
        self._kind: dict[str, Any] | None = None
        self._job: Job | None = None

    @property
    def clicks(self) -> ResidentClicks:
        """Drawn when first asked for."""
        if self._clicks is None:
            self._clicks = ResidentClicks(2048 if self.quick else CLICKS, self.sizes, self.device)
        return self._clicks

    def job(self, **kind: Any) -> Job:
        """A DeepFM; see `job.deepfm`."""
        if kind != self._kind:
            self.drop()
            # torch limits the number of compiled sizes.
            torch._dynamo.reset()
            counters.clear()
            self._kind, self._job = kind, deepfm(self.sizes, self.device, **kind)
        return self._job

    def drop(self) -> None:
        """Free the job; its hooks form a reference cycle."""
        self._kind = self._job = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def size(self, batch: int) -> int:
        """The size of a batch, which is small in a quick run."""
        return 256 if self.quick else batch

    def batches(self, job: Job, batch: int) -> Iterator[SentBatch]:
        """Global batches without end."""
        fields, order = list(job.front.fields), Order(self.clicks.rows, "global", 0, 0)
        source = GlobalBatches(self.clicks, fields, batch, 0, 1, order)
        return prefetch(_endless(source), job.front, self.device)

    def speed(
        self,
        step: Callable[[], Any],
        batch: int,
        flush: Callable[[], Any] = lambda: None,
        warm_up: int = 8,
    ) -> dict[str, Any]:
        """Samples a second of steps that end with a flush, and the peak memory."""
        warm_up, shortest, most = (2, 0.1, 3) if self.quick else (warm_up, SECONDS, MOST_STEPS)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(warm_up):
            step()
        flush()
        # The first steps compile; these say how many fill the time.
        tried = seconds_until_done(lambda: [step() for _ in range(warm_up)], self.device) / warm_up
        steps = int(min(most, max(shortest / tried, 3 if self.quick else FEWEST_STEPS)))

        def train() -> None:
            for _ in range(steps):
                step()
            flush()

        seconds = seconds_until_done(train, self.device)
        speed = steps * batch / seconds
        found = {
            "batch": batch,
            "steps": steps,
            "samples_per_second": speed,
            "seconds_for_413_million": PAPER_SAMPLES / speed,
            "milliseconds_a_step": 1e3 * seconds / steps,
        }
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_reserved()
        return found


def _endless(batches: GlobalBatches) -> Iterator[Batch]:
    while True:
        yield from batches


def floors(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """Bytes a second of a copy, read and written; operations a second of the MLP's products."""

    def copy() -> dict[str, Any]:
        source = torch.ones(1 << 24 if quick else 1 << 32, dtype=torch.uint8, device=device)
        call = partial(torch.empty_like(source).copy_, source)
        seconds = statistics.median(device_seconds([call] * 6, device)[1:])
        return {"bytes_per_second": 2 * source.numel() / seconds}

    def products(dtype: torch.dtype, samples: int, widths: list[tuple[int, int]]) -> dict[str, Any]:
        like = {"device": device, "dtype": dtype}
        pairs = [(torch.randn(samples, a, **like), torch.randn(a, b, **like)) for a, b in widths]
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        repeats = 4 if quick else 30
        calls = [lambda: [a @ b for a, b in pairs]] * repeats
        taken = statistics.median(device_seconds(calls, device)[repeats // 3 :])
        torch.set_float32_matmul_precision(allowed)
        return {"flops": samples * sum(2 * a * b for a, b in widths) / taken}

    yield "copy", copy
    # Products are faster if rows begin at multiples of 16 bytes.
    mlp = [(-(-before // 8) * 8, -(-after // 8) * 8) for before, after in WIDTHS]
    for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
        yield f"mlp {name}", partial(products, dtype, 64 if quick else BATCH, mlp)
        side = 64 if quick else 8192
        yield f"square {name}", partial(products, dtype, side, [(side, side)])


def training(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """DeepFM by batch size, precision and which rows take a step, the most important first."""
    kinds = [("bf16", "all"), ("tf32", "all"), ("bf16", "touched"), ("tf32", "touched")]
    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        for precision, rows in kinds:
            for batch in (BATCH, 8192):
                kind = {"precision": precision, "rows": rows}
                name = f"{precision}, rows {rows}, {batch:,}"
                yield name, partial(_train, setting, setting.size(batch), kind)
        # What a run falls back to.
        kind = {"precision": "bf16", "rows": "all", "kernels": "torch"}
        yield f"plain torch, {BATCH:,}", partial(_train, setting, setting.size(BATCH), kind)


def _train(setting: Setting, batch: int, kind: dict[str, Any]) -> dict[str, Any]:
    job, number = setting.job(**kind), count(1)
    source, tables = setting.batches(job, batch), local_cowclip_tables(job.model)

    def flush() -> None:
        for held in tables:
            held.flush()

    for held in tables:
        held.row_counts.zero_()
    steps = count()

    def step() -> None:
        next(steps)
        train_step(job, next(source), next(number), setting.here)

    found = kind | setting.speed(step, batch, flush, WARM_UP)
    # Of lookup and update: an id and a row are read and the row is written; its gradient is written
    # and read; weights and two moments of each distinct row, and of the rows that are brought up to
    # date, are read and written.
    touched = sum(int(held.row_counts[0]) for held in tables) / next(steps)
    waiting = sum(setting.sizes) / WINDOW if kind["rows"] == "all" else 0
    row, lookups = 12 * FLOAT, 26 * batch
    found["distinct_rows_a_step"] = touched
    found["table_bytes_a_step"] = lookups * (8 + 4 * row) + (touched + waiting) * 6 * row
    # Backward has two products for each product of forward.
    found["mlp_flops_a_step"] = 3 * batch * FLOPS
    # Of the network, one for each batch size so far; 0 if not compiled.
    found["compiled_graphs"] = counters["stats"]["unique_graphs"]
    return found


def yardsticks(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """The same network and batches on tables that a user would pick instead.

    Only the rows of the batch take a step in all of them, without L2 and clip.
    """
    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        for batch in (BATCH, 8192):
            size = setting.size(batch)
            for name, kind in FUSED.items():
                if kind is Adam and device.type == "cpu":
                    # FBGEMM has none there.
                    continue
                tables = kind, {"lr": 1e-3, "eps": 1e-8}
                yield f"{name}, {batch:,}", partial(_with_torchrec, setting, size, tables)
            yield f"plain PyTorch with SparseAdam, {batch:,}", partial(_with_sparse, setting, size)


def _with_torchrec(setting: Setting, batch: int, tables: TableOptimizer) -> dict[str, Any]:
    setting.drop()
    job = deepfm(setting.sizes, setting.device, precision="bf16", tables=tables)
    source, number = setting.batches(job, batch), count(1)

    def step() -> None:
        # `train_step` would wait for each loss: TorchRec's tables cannot refuse a step later.
        sent = next(source)
        received = sent.received()
        looked_up = job.front.lookup_sent(sent.ids)
        _, grads = _dense_pass(job, received, looked_up, next(number), setting.here)
        torch.autograd.backward(looked_up.tensors(), grads)
        job.dense_optimizer.step()

    return {"precision": "bf16"} | setting.speed(step, batch)


class _SparseTable(nn.Module):
    """All fields in one `nn.Embedding` with sparse gradients."""

    def __init__(self, sizes: list[int], columns: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(sizes), columns, sparse=True, device=device)
        starts = torch.tensor([0, *accumulate(sizes)][:-1], device=device)
        self.register_buffer("starts", starts, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids + self.starts).flatten(1)


def _with_sparse(setting: Setting, batch: int) -> dict[str, Any]:
    setting.drop()
    # The network of a job whose own tables are next to nothing.
    job = deepfm([2] * len(setting.sizes), setting.device, precision="bf16")
    columns = job.front.columns.stored
    table = _SparseTable(setting.sizes, columns, setting.device)
    tables = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    fields = list(job.front.fields)
    order = Order(setting.clicks.rows, "global", 0, 0)
    source = _endless(GlobalBatches(setting.clicks, fields, batch, 0, 1, order))
    number = count(1)

    def step() -> None:
        received = next(source)
        ids = received.sparse.values().view(len(fields), batch).T.long()
        rows = table(ids)
        looked_up = LookedUp(rows, {})
        _, grads = _dense_pass(job, received, looked_up, next(number), setting.here)
        tables.zero_grad(set_to_none=True)
        torch.autograd.backward(looked_up.tensors(), grads)
        tables.step()
        job.dense_optimizer.step()

    return {"precision": "bf16"} | setting.speed(step, batch)


def profile(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """The 30 kernels of a step that take the most time: name, calls and microseconds a step."""

    def kernels() -> dict[str, Any]:
        batch = setting.size(BATCH)
        steps, warm_up = (2, 1) if quick else (10, WARM_UP)
        job, number = setting.job(precision="bf16"), count(1)
        source = setting.batches(job, batch)

        def step() -> None:
            train_step(job, next(source), next(number), setting.here)

        for _ in range(warm_up):
            step()
        times = kernel_times([step] * steps, setting.device)
        for name, _, seconds in times[:12]:
            print(f"{1e6 * seconds / steps:>10.0f} us  {name[:80]}", flush=True)
        return {
            "batch": batch,
            "kernels_a_step": sum(calls for _, calls, _ in times) / steps,
            "milliseconds_of_kernels_a_step": 1e3 * sum(s for *_, s in times) / steps,
            "kernels": [
                {
                    "name": name[:160],
                    "calls_a_step": calls / steps,
                    "microseconds_a_step": 1e6 * seconds / steps,
                }
                for name, calls, seconds in times[:30]
            ],
        }

    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        yield f"bf16, rows all, {BATCH:,}", kernels


def compiled(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """With torch.compile of the network; `cuda_graphs` on GPUs only."""
    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        forms = ("default", "cuda_graphs") if device.type == "cuda" else ("default",)
        for form in forms:
            for batch in (BATCH, 8192):
                kind = {"precision": "bf16", "rows": "all", "compilation": form}
                name = f"compile {form}, {batch:,}"
                yield name, partial(_train, setting, setting.size(batch), kind)


def large_batch(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """A batch of 524,288."""
    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        for rows in ("all", "touched"):
            kind = {"precision": "bf16", "rows": rows}
            yield (
                f"bf16, rows {rows}, 524,288",
                partial(_train, setting, setting.size(1 << 19), kind),
            )


def whole_step_graph(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """Replays of a CUDA graph of one whole step, beside that step launched kernel by kernel.

    It says what graphs could bring: the replay has the learning rate, the bias correction and the
    ids of the step that was recorded.
    """

    def replays(batch: int) -> dict[str, Any]:
        job, number = setting.job(precision="bf16"), count(1)
        source, flag = setting.batches(job, batch), job.table_update.flag
        for sent in islice(source, WARM_UP):
            train_step(job, sent, next(number), setting.here)
        held = next(source)
        batch_of, tables = held.received(), local_cowclip_tables(job.model)
        # What the host reads or waits for cannot be recorded.
        end_step, flag.end_step = flag.end_step, lambda step: None

        def step() -> None:
            for table in tables:
                table.updated = None
            sent = SentBatch(batch_of, job.front.send(batch_of.sparse))
            train_step(job, sent, next(number), setting.here)

        try:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        finally:
            flag.end_step = end_step
        one_by_one = statistics.median(device_seconds([step] * 30, setting.device)[10:])
        replayed = statistics.median(device_seconds([graph.replay] * 60, setting.device)[20:])
        return {
            "batch": batch,
            "milliseconds_one_by_one": 1e3 * one_by_one,
            "milliseconds_replayed": 1e3 * replayed,
            "seconds_for_413_million_replayed": PAPER_SAMPLES * replayed / batch,
        }

    if device.type != "cuda":
        return
    with ExitStack() as stack:
        setting = Setting(device, quick, stack)
        for batch in (BATCH, 8192):
            yield f"{batch:,}", partial(replays, batch)
