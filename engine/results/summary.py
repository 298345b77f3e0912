"""The result of a run: `summary.json`, and the table that is printed at its end."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

import stampede
from stampede.engine.console import readable_bytes, readable_metric, table
from stampede.engine.metrics import METRICS, PARTS, selected_metrics
from stampede.engine.processes import peak_memory_bytes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.training.plateau import METRIC_NAMES
from stampede.engine.training.training_run import TrainingRun


def summarize(run: TrainingRun) -> dict[str, Any]:
    """The content of `summary.json`; all ranks must call it.

    `auc`, `logloss` and the other metrics are of the test part after `best_epoch`, whose weights
    `predict` and `export` use; `validation` has those of the validation part, and `last` both
    parts' at the newest evaluation. The run adds those of other models, see `compare`, and
    `advice`.
    """
    config, progress, dataset = run.config, run.progress, run.dataset
    last, selected = (
        {
            part: {name: value for name, value in found.items() if name != "samples"}
            for part, found in evaluation.items()
        }
        # No epoch may have been finished.
        for evaluation in (progress.last, progress.selected or progress.last)
    )
    # A period's test rows are its training rows, scored before training.
    names = ["train", "validation", "test"][: 1 if dataset.period else 3]
    parts = {name: getattr(dataset, name) for name in names}
    ids = sum(dataset.tables.values())
    device = run.processes.device
    # The largest of any process.
    peak = torch.tensor(peak_memory_bytes(device), device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {
        **selected["test"],
        **{part: found for part, found in selected.items() if part != "test"},
        "best_auc": selected["test"]["auc"],
        "best_epoch": progress.best_epoch,
        "selected_on": config.evaluate.select_on,
        "evaluated_epochs": -(-progress.epoch // config.evaluate.every_epochs),
        "selected_by": config.evaluate.metric,
        "last": {"epoch": progress.epoch, **last},
        "stopped_early": progress.epoch < config.train.epochs,
        "clipped_share": progress.clipped_share,
        "skipped_rows": progress.skipped_rows,
        "skipped_batches": progress.skipped_batches,
        "samples_per_second": progress.samples / progress.train_seconds,
        "train_seconds": progress.train_seconds,
        "steps": progress.step,
        "epochs": progress.epoch,
        "batch_size": config.train.batch_size,
        "period": dataset.period or None,
        "rows": {name: part.rows for name, part in parts.items() if part is not None},
        "ids": ids,
        "parameters": {
            # Each id has an embedding and a first-order weight.
            "tables": sum(
                rows * (run.job.front.columns_of(table).dim + 1)
                for table, rows in dataset.tables.items()
            ),
            "dense": sum(parameter.numel() for parameter in run.job.dense_parameters.values()),
        },
        "world_size": run.processes.world_size,
        "device": device.type,
        "peak_memory_bytes": int(peak),
        "version": stampede.__version__,
        "end_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def describe(summary: dict[str, Any], folder: RunFolder, plan: str) -> str:
    """The table printed at the end of a run."""
    reached = in_gauc = unknown = regression = trees = ""
    if summary["attainable_auc"] is not None and summary["auc"] is not None:
        ratio = (summary["auc"] - 0.5) / (summary["attainable_auc"] - 0.5)
        reached = f"(reached {ratio:.1%} of it above 0.5 on the test part)"
        reached = f"{summary['attainable_auc']:.4f} {reached}"
    if summary.get("gauc_groups") is not None:
        left_out = f"{summary['gauc_left_out']:,} of one class left out"
        in_gauc = f"test part: {summary['gauc_groups']:,} groups, {left_out}"
        unknown = summary["gauc_unknown_samples"]
    if (found := summary["logistic_regression"]) is not None:
        regression = _baseline(found, "logistic regression")
    if (found := summary["boosted_trees"]) is not None:
        trees = _baseline(found, f"{found['trees']} trees of {found['leaves']} leaves")
    clipped, steps = summary["clipped_share"], summary["steps"]
    skipped, batches = summary["skipped_rows"], summary["skipped_batches"]
    pairs = summary.get("validation", {}).get("logit_calibration", [])
    scales = ", ".join(f"{scale:.2f}" for scale, _ in pairs)
    is_scaled = any(scale < 1 for scale, _ in pairs)
    rows = [
        ("attainable AUC", reached),
        ("GAUC", in_gauc),
        ("not in GAUC", unknown and f"{unknown:,} samples whose id is missing, rare or unseen"),
        ("test AUC of LR", regression),
        ("of LightGBM", trees),
        ("calibrated", is_scaled and f"logits scaled by {scales}, see evaluate.calibrate"),
        ("stopped early", summary["stopped_early"] and f"after epoch {summary['epochs']}"),
        ("rows clipped", clipped is not None and f"{clipped:.2%} of the rows in the batches"),
        ("rows skipped", skipped and f"{skipped:,}, gradients not finite"),
        ("batches skipped", batches and f"{batches:,} of {steps:,}, losses not finite"),
        ("samples/s", f"{summary['samples_per_second']:,.0f}"),
        ("training time", f"{summary['train_seconds']:.1f} s"),
        ("peak memory", f"{readable_bytes(summary['peak_memory_bytes'])} in one process"),
        ("tables", f"{plan} on {summary['world_size']} x {summary['device']}"),
        ("in the store", folder.url),
        ("results", str(folder.path)),
        ("learning curve", str(folder.curve)),
        ("checkpoints", str(folder.checkpoints)),
    ]
    return f"{_metric_table(summary)}\n{table((name, text) for name, text in rows if text)}"


def _baseline(found: dict[str, Any], what: str) -> str:
    scores = f"{readable_metric(found['test_auc'])}, logloss {found['test_logloss']:.4f}"
    return f"{scores}: {what} on the same features, {found['seconds']:.1f} s"


def _metric_rows(columns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each metric: what it is called, and its values."""
    return [
        [shown, *(readable_metric(column.get(name)) for column in columns)]
        for name, shown in METRICS.items()
        if any(name in column for column in columns)
    ]


def _metric_table(summary: dict[str, Any]) -> str:
    """Metrics of the selected epoch, beside the last epoch's if it differs."""
    best, last = summary["best_epoch"], summary["last"]
    blocks = [selected_metrics(summary)]
    if summary.get("period"):
        title = f"period {summary['period']}: its rows, scored before they were trained on"
    elif not best:
        title = f"last evaluation, after step {summary['steps']:,}"
    else:
        part = summary["selected_on"]
        over = " over the goals" * ("goals" in blocks[0][part])
        title = (
            f"epoch {best}: best {METRIC_NAMES[summary['selected_by']]}{over} on the {part} part"
        )
        if blocks[0][part]["auc"] is None and summary["selected_by"] != "logloss":
            title = f"epoch {best}: the last one, as the AUC of the {part} part is undefined"
        elif summary["evaluated_epochs"] == 1 < best:
            title = f"epoch {best}: the only one that was evaluated"
        elif part == "test":
            title += " itself, so optimistic"
        if best != last["epoch"]:
            title += f"; epoch {last['epoch']}: the last one"
            blocks.append({part: last[part] for part in PARTS if part in last})
    parts = [part for part in PARTS if part in blocks[0]]
    rows = [["", *parts * len(blocks)]]
    if len(blocks) > 1:
        rows.insert(0, ["", *(f"epoch {epoch}" for epoch in (best, last["epoch"]) for _ in parts)])
    columns = [block[part] for block in blocks for part in parts]
    rows += _metric_rows(columns)
    for goal in columns[0].get("goals", ()):
        rows.append([f"of {goal}"])
        found = [column["goals"][goal] for column in columns]
        rows += [[f"  {name}", *cells] for name, *cells in _metric_rows(found)]
    first = max(14, 2 + max(len(name) for name, *_ in rows))
    width = max(12, 2 + max(len(cell) for _, *cells in rows for cell in cells))
    lines = [
        (f"  {name:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()
        for name, *cells in rows
    ]
    return "\n".join([title, *lines])
