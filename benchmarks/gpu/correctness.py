"""Compares results of the device with float64, with the CPU and with the authors' code."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import Case, code_since, kept_of
from clicks import cardinalities
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from job import RATES, deepfm
from resident_clicks import ResidentClicks
from torch import Tensor

from stampede.data import Batch, GlobalBatches, Order
from stampede.engine.checkpoint.tensors import Reader, on_cpu, write_tensors
from stampede.engine.job import Job
from stampede.engine.job.build import build
from stampede.engine.processes import Processes, processes
from stampede.engine.step import flush_tables, send, train_step
from stampede.optim import CowClip, NonFiniteGradientError, local_cowclip_tables
from stampede.optim.rules import Adam
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.triton import check
from stampede.optim.update_settings import UpdateSettings
from support.golden import TOLERANCE, Golden, follow
from support.updated_tables import Tables, assert_follows, of_rows, reference_of

# Table rows: many, so that some rows wait; few, so that ids repeat.
SIZES = {"large": (100_000, 50_000), "small": (300, 41, 1)}
SETTINGS = {
    "cowclip": UpdateSettings(l2=1e-4, clip=CowClip(ratio=0.5, bound=1e-3)),
    "touched": UpdateSettings(l2=1e-4, clip=CowClip(ratio=0.5, bound=1e-3), rows="touched"),
    "paper": UpdateSettings(l2=1e-4, clip=CowClip(ratio=0.5, bound=1e-2, variant="paper")),
    "row": UpdateSettings(clip=CowClip(granularity="row", threshold=0.1)),
    "no clip": UpdateSettings(clip=CowClip(granularity="none"), l2=1e-2, weight_decay=0.1),
    "torch's epsilon": UpdateSettings(rule=Adam((0.5, 0.9), 1e-3, "torch"), weight_decay=0.3),
}
POOLINGS = {
    "sum": {"pooling": PoolingMode.SUM},
    "mean": {"pooling": PoolingMode.MEAN},
    "sequence": {"pooling": PoolingMode.NONE},
}
GOLDEN = "largebatchctr_deepfm.npz"


def cases(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """What is checked, the most important first."""
    yield "kernels: 12 columns", partial(_kernels, device, SETTINGS["cowclip"], 12)
    yield "deepfm: 1 step as on the CPU", partial(_as_on_cpu, device, 1)
    yield "deepfm: 50 steps as on the CPU", partial(_as_on_cpu, device, 5 if quick else 50)
    if package is not None:
        yield "the authors' code", partial(_golden, device, package / "golden" / GOLDEN)
    yield "checkpoints", partial(_checkpoints, device)
    # More steps than the window; in `small`, ids repeat hundreds of times.
    steps = 3 if quick else 90
    for size, pooling in [("large", "sum"), ("small", "mean"), ("small", "sequence")]:
        name = f"tables: {size}, {pooling}"
        yield name, partial(_follows, device, "cowclip", size, pooling, steps)
    for setting in SETTINGS:
        steps = 3 if quick else 12
        yield f"tables: {setting}", partial(_follows, device, setting, "small", "sum", steps)
    yield "tables: plain torch", partial(_plain_torch, device, 3 if quick else 12)
    yield "not finite", partial(_undone, device)
    yield "steps after one not finite", partial(_goes_on, device)
    yield "two lookups a step", partial(_two_lookups, device, 3 if quick else 40)
    yield "kernels: 64 columns, no clip", partial(_kernels, device, SETTINGS["no clip"], 64)


def _kernels(device: torch.device, settings: UpdateSettings, columns: int) -> dict[str, Any]:
    """Largest error of each kernel against float64, in the check that a run makes too."""
    weights = torch.zeros(1000, columns, device=device)
    array = TableArray.create([TableShard("t", 1000)], weights, settings, columns)
    found: dict[str, Any] = {"errors": {}}
    wrong, start = [], time.perf_counter()
    for kernel, compare in check.comparisons(array, pooled=True, mean=False):
        began = time.time()
        try:
            worst = {what: check.largest_error(*both) for what, *both in compare()}
        except Exception as failure:
            wrong.append(kernel)
            found[f"{kernel} failed"] = kept_of(failure, began)
            continue
        # The second time, with weights, under the same name.
        worst = max(worst.items(), key=lambda named: named[1])
        found["errors"][kernel] = max(worst[1], found["errors"].get(kernel, 0.0))
        if not worst[1] <= check.TOLERANCE:
            wrong.append(kernel)
            code = code_since(0, kernel.split("kernel ")[-1].split()[0])
            found[f"{kernel} is wrong"] = {"what": worst[0], "code": code}
    found["check_seconds"] = round(time.perf_counter() - start, 2)
    if wrong:
        found["error"] = f"wrong: {', '.join(wrong)}"
    return found


def _follows(device: torch.device, setting: str, size: str, pooling: str, steps: int) -> None:
    """Steps of random batches agree with the float64 equations on the CPU."""
    tables = _train_tables(device, "triton", SETTINGS[setting], size, pooling, steps)
    if device.type == "cuda" and tables.owner.flag is None:
        raise AssertionError("the updates are not queued")


def _plain_torch(device: torch.device, steps: int) -> None:
    """What a run falls back to."""
    tables = _train_tables(device, "torch", SETTINGS["cowclip"], "small", "sum", steps)
    assert tables.owner.flag is None


def _train_tables(
    device: torch.device,
    kernels: str,
    settings: UpdateSettings,
    size: str,
    pooling: str,
    steps: int,
) -> Tables:
    sizes, draw = SIZES[size], torch.Generator().manual_seed(1)
    tables = Tables(
        of_rows(*sizes), [12] * len(sizes), list(range(len(sizes))), setting=settings,
        device=device, kernels=kernels, **POOLINGS[pooling],
    )  # fmt: skip
    reference = reference_of(tables.fill(draw), settings)
    batch = {"small": 512, "large": 64}[size]
    for _ in range(steps):
        tables.train(draw, reference, batch, mean=pooling == "mean", sequence=pooling == "sequence")
    assert_follows(tables, reference)
    return tables


def _undone(device: torch.device) -> None:
    """A gradient that is not finite is noticed and leaves the tables unchanged."""
    tables = Tables(of_rows(300), [12], [0], device=device, kernels="triton")
    tables.fill(torch.Generator().manual_seed(1))
    ids, offsets = (t.to(device) for t in (torch.tensor([3, 7]), torch.tensor([0, 1, 2])))
    tables.tbe(ids, offsets).sum().backward()
    before = tables.tbe.weights_tensor().clone()
    try:
        (tables.tbe(ids, offsets) * float("nan")).sum().backward()
        tables.tbe.flush()
    except NonFiniteGradientError:
        if not torch.equal(before, tables.tbe.weights_tensor()):
            raise AssertionError("tables were changed") from None
        return
    raise AssertionError("a NaN was not noticed")


def _goes_on(device: torch.device) -> None:
    """A step that is not finite is left out; those after it follow the equations."""
    draw = torch.Generator().manual_seed(1)
    tables = Tables(of_rows(300, 41), [12, 12], [0, 1], device=device, kernels="triton")
    reference = reference_of(tables.fill(draw), tables.setting)
    ids, offsets = (t.to(device) for t in (torch.tensor([3, 7]), torch.tensor([0, 1, 2])))
    for _ in range(3):
        tables.train(draw, reference, 256)
        try:
            (tables.tbe(ids, offsets) * float("inf")).sum().backward()
            tables.tbe.flush()
        except NonFiniteGradientError:
            continue
        raise AssertionError("an infinity was not noticed")
    tables.train(draw, reference, 256)
    weights = tables.whole_tables()
    torch.testing.assert_close(weights, reference.weights, rtol=1e-4, atol=1e-5)


def _two_lookups(device: torch.device, steps: int) -> None:
    """Two lookups of a table in one step make one update, as on the CPU."""
    weights = []
    for kind in (torch.device("cpu"), device):
        draw = torch.Generator().manual_seed(1)
        tables = Tables(of_rows(300), [12], [0], device=kind, kernels="triton")
        tables.fill(draw)
        for _ in range(steps):
            offsets = torch.arange(65, device=kind)
            looked_up = [
                tables.tbe(torch.randint(0, 300, (64,), generator=draw).to(kind), offsets)
                for _ in range(2)
            ]
            upstream = torch.randn(64, 12, generator=draw).to(kind)
            (looked_up[0] * upstream + looked_up[1].square()).sum().backward()
        weights.append(tables.whole_tables())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


class _SmallDeepFM:
    """A small DeepFM on a device, and always the same batches."""

    def __init__(self, here: Processes, steps: int) -> None:
        sizes = cardinalities(20_000)
        clicks = ResidentClicks(256 * steps, sizes, torch.device("cpu"))
        self.here = here
        self.job: Job = deepfm(sizes, here.device, hidden=(32, 32))
        fields = list(self.job.front.fields)
        self._batches: list[Batch] = list(
            GlobalBatches(clicks, fields, 256, 0, 1, Order(clicks.rows))
        )

    def train(self, first: int, stop: int) -> list[float]:
        """The losses of steps `first` up to `stop`, counted from 0."""
        losses = [
            train_step(self.job, send(batch, self.job.front, self.here.device), step, self.here)
            for step, batch in islice(enumerate(self._batches, 1), first, stop)
        ]
        flush_tables(self.job, stop, self.here.device)
        return [loss.item() for loss in losses]

    def weights(self) -> Tensor:
        """All tables' weights, on the CPU."""
        tables = local_cowclip_tables(self.job.model)
        return torch.cat([t.weights_tensor().detach().cpu().clone() for t in tables])


def _as_on_cpu(device: torch.device, steps: int) -> dict[str, Any]:
    """Losses and weights after training steps agree between the device and the CPU."""
    losses, weights = [], []
    for kind in ("cpu", device.type):
        with processes(kind) as here:
            small = _SmallDeepFM(here, steps)
            losses.append(small.train(0, steps))
            weights.append(small.weights())
    found = _loss_deviation(*losses)
    # In learning rates: where a gradient is close to nothing, Adam's step is of any size.
    apart = (weights[1] - weights[0]).abs() / RATES.embedding_lr
    found["largest_weight_deviation_in_rates"] = apart.max().item()
    found["share_of_weights_off_by_a_percent"] = (apart > 0.01).double().mean().item()
    if found["largest_loss_deviation"] > (1e-5 if steps == 1 else 1e-3):
        found["error"] = f"losses {losses[1][:5]}... on the CPU {losses[0][:5]}"
    elif steps == 1 and found["share_of_weights_off_by_a_percent"] > 1e-3:
        found["error"] = "the weights differ from those on the CPU"
    return found


def _loss_deviation(right: list[float], found: list[float]) -> dict[str, float]:
    pairs = zip(right, found, strict=True)
    apart = [abs(a - b) / a if math.isfinite(b) else math.inf for a, b in pairs]
    return {"largest_loss_deviation": max(apart)}


def _golden(device: torch.device, path: Path) -> dict[str, Any]:
    """The authors' TensorFlow code is followed step by step."""
    golden = Golden(path)
    with processes(device.type) as here:
        config = golden.config(["run.kernels=triton"])
        job = build(config, golden.dataset(), here)
        worst = follow(golden, config, job, here)
    found: dict[str, Any] = {"worst": worst, "allowed": TOLERANCE}
    if not worst < TOLERANCE:
        found["error"] = f"off by {worst:.1e} of the movement, more than {TOLERANCE:.0e}"
    return found


def _checkpoints(device: torch.device) -> dict[str, Any]:
    """A checkpoint from the CPU continues on the device, and one from there on the CPU."""
    with processes("cpu") as here:
        right = _SmallDeepFM(here, 9).train(0, 9)
    losses: list[float] = []
    entries: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(["cpu", device.type, "cpu"]):
            with processes(kind) as here:
                small, first = _SmallDeepFM(here, 9), 3 * number
                if number:
                    state = small.job.state(0)
                    reader = Reader(Path(folder) / str(number), entries)
                    dcp.load(state, storage_reader=reader, process_group=here.checkpoint_group)
                    small.job.model.load_state_dict(state["model"])
                    small.job.model.fused_optimizer.set_optimizer_step(first)
                losses += small.train(first, first + 3)
                target = Path(folder) / str(number + 1)
                target.mkdir()
                state = on_cpu(small.job.state(0), copy=True)
                entries, _ = write_tensors(state, target, here.checkpoint_group)
    found: dict[str, Any] = _loss_deviation(right, losses)
    if found["largest_loss_deviation"] > 1e-4:
        found["error"] = f"losses {losses}, without checkpoints on the CPU {right}"
    return found
