"""The quickstart's AUC on the device beside the CPU's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import Case

from stampede.data import GlobalBatches, Order
from stampede.data.synthetic import SyntheticClicks
from stampede.engine.config.load import load_config
from stampede.engine.job.build import build
from stampede.engine.job.optimizers import LearningRates
from stampede.engine.metrics import PartMetrics
from stampede.engine.processes import processes
from stampede.engine.step import flush_tables, prefetch, train_step
from support.paths import ROOT


def cases(device: torch.device, quick: bool, package: Path | None) -> Iterator[Case]:
    """The same training on both; their AUCs differ by rounding only."""
    yield "device", partial(_auc, device, quick)
    yield "cpu", partial(_auc, torch.device("cpu"), quick)


def _auc(device: torch.device, quick: bool) -> dict[str, Any]:
    config = load_config(ROOT / "configs/quickstart.yaml", ["run.kernels=triton"])
    rows, tested = (20_000, 5_000) if quick else (config.data.rows, config.data.test_rows)
    clicks = SyntheticClicks(scale=config.data.scale, zipf=config.data.zipf)
    dataset, size = clicks.dataset(rows, tested), config.train.batch_size
    with processes(device.type) as here:
        job = build(config, dataset, here)
        fields, start = list(dataset.vocabulary_sizes), time.perf_counter()
        train = GlobalBatches(dataset.train, fields, size, 0, 1, Order(rows, "none"), ahead=2)
        steps = len(train)
        rates = LearningRates(config, job.scaling.scaled, steps, steps)
        for step, sent in enumerate(prefetch(train, job.front, here.device), 1):
            job.set_learning_rates(*rates.after(step - 1))
            train_step(job, sent, step, here)
        flush_tables(job, steps, here.device)
        seconds = time.perf_counter() - start
        job.model.eval()
        metrics = PartMetrics([])
        with torch.no_grad():
            for batch in GlobalBatches(dataset.test, fields, size, 0, 1):
                on_device = batch.to(here.device)
                logits = job.model(on_device.sparse, on_device.dense).float().cpu()
                given = (logits, batch.label, batch.weight)
                metrics.add(*(values[: batch.samples].numpy() for values in given))
    result = metrics.result()
    return {key: result[key] for key in ("auc", "logloss")} | {"training_seconds": seconds}
