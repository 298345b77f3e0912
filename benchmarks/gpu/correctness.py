"""Compares results of the device with float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from clicks import cardinalities
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from job import deepfm
from resident_clicks import ResidentClicks

from stampede.data import GlobalBatches, Order
from stampede.engine.processes import processes
from stampede.engine.step import send, train_step
from stampede.optim import CowClip, NonFiniteGradientError
from stampede.optim.rules import Adam
from stampede.optim.settings import UpdateSettings
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


def check(device: torch.device, quick: bool = False) -> dict[str, str]:
    """`ok` or the error, by name of the check."""
    wrong = {}
    for setting in SETTINGS:
        steps = 3 if quick else 12
        wrong[f"tables: {setting}"] = _outcome(_follows, device, setting, "small", "sum", steps)
    # More steps than the window; in `small`, ids repeat hundreds of times.
    steps = 3 if quick else 90
    for size, pooling in [("large", "sum"), ("small", "mean"), ("small", "sequence")]:
        name = f"tables: {size}, {pooling}"
        wrong[name] = _outcome(_follows, device, "cowclip", size, pooling, steps)
    wrong["not finite"] = _outcome(_undone, device)
    wrong["steps after one not finite"] = _outcome(_goes_on, device)
    wrong["two lookups a step"] = _outcome(_two_lookups, device, 3 if quick else 40)
    wrong["deepfm as on the CPU"] = _outcome(_as_on_cpu, device, 3 if quick else 20)
    for name, what in wrong.items():
        print(f"{name:<28} {what.splitlines()[0]}", flush=True)
    return wrong


def _outcome(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "ok"


def _follows(device: torch.device, setting: str, size: str, pooling: str, steps: int) -> None:
    """Steps of random batches agree with the float64 equations on the CPU."""
    settings, sizes, draw = SETTINGS[setting], SIZES[size], torch.Generator().manual_seed(1)
    tables = Tables(
        of_rows(*sizes), [12] * len(sizes), list(range(len(sizes))), setting=settings,
        device=device, **POOLINGS[pooling],
    )  # fmt: skip
    if device.type == "cuda" and tables.owner.flag is None:
        raise AssertionError("the updates are not queued")
    reference = reference_of(tables.fill(draw), settings)
    batch = {"small": 512, "large": 64}[size]
    for _ in range(steps):
        tables.train(draw, reference, batch, mean=pooling == "mean", sequence=pooling == "sequence")
    assert_follows(tables, reference)


def _undone(device: torch.device) -> None:
    """A gradient that is not finite is noticed and leaves the tables unchanged."""
    tables = Tables(of_rows(300), [12], [0], device=device)
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
    tables = Tables(of_rows(300, 41), [12, 12], [0, 1], device=device)
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
        tables = Tables(of_rows(300), [12], [0], device=kind)
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


def _as_on_cpu(device: torch.device, steps: int) -> None:
    """Losses of training steps agree between the device and the CPU."""
    sizes = cardinalities(20_000)
    clicks = ResidentClicks(256 * steps, sizes, torch.device("cpu"))
    losses = {}
    for kind in ("cpu", device.type):
        with processes(kind) as here:
            job = deepfm(sizes, here.device, hidden=(32, 32))
            fields = list(job.front.fields)
            batches = GlobalBatches(clicks, fields, 256, 0, 1, Order(clicks.rows))
            losses[kind] = [
                train_step(job, send(batch, job.front, here.device), step, here).item()
                for step, batch in enumerate(batches, 1)
            ]
    for step, (one, other) in enumerate(zip(losses["cpu"], losses[device.type], strict=True), 1):
        if not math.isclose(one, other, rel_tol=1e-4):
            raise AssertionError(f"step {step}: loss {other}, on the CPU {one}")
