"""The result of a run, for machines and for people."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stampede.engine.checkpoint import Progress
from stampede.engine.config import Config
from stampede.engine.console import readable_auc, readable_bytes, table
from stampede.engine.monitor import peak_memory_bytes
from stampede.engine.processes import Processes
from stampede.engine.run_folder import RunFolder

# Metrics of the test part that are one number, as they are shown.
_FURTHER = {
    "pr_auc": "test PR-AUC",
    "normalized_entropy": "norm. entropy",
    "calibration": "calibration",
}


def summarize(config: Config, progress: Progress, processes: Processes) -> dict[str, Any]:
    """What goes into `summary.json`; all ranks must call it.

    `auc`, `logloss` and the other metrics are of the last evaluation of the test part; `best_auc`
    is the test AUC of `best_epoch`, which was chosen on the part that `selected_on` names. What the
    run adds later: `logistic_regression`, see there, or None, and the sentences of `advice`.
    """
    metrics = {name: value for name, value in progress.last.items() if name != "samples"}
    return {
        **metrics,
        "best_auc": progress.best_auc,
        "best_epoch": progress.best_epoch,
        "selected_on": config.evaluate.select_on,
        "stopped_early": progress.epoch < config.train.epochs,
        "clipped_share": clipped_share(progress),
        "skipped_rows": progress.skipped_rows,
        "skipped_batches": progress.skipped_batches,
        "samples_per_second": progress.samples / progress.train_seconds,
        "train_seconds": progress.train_seconds,
        "steps": progress.step,
        "epochs": progress.epoch,
        "batch_size": config.train.batch_size,
        "world_size": processes.world_size,
        "device": processes.device.type,
        "peak_memory_bytes": _peak_memory(processes),
    }


def clipped_share(progress: Progress) -> float | None:
    """Share of the batches' rows that were clipped; None where the optimizer does not count."""
    if not progress.touched_rows:
        return None
    return progress.clipped_rows / progress.touched_rows


def describe(summary: dict[str, Any], folder: RunFolder, plan: str) -> str:
    """The table printed at the end of a run."""
    attainable = summary["attainable_auc"]
    rows = [("test AUC", readable_auc(summary["auc"]))]
    if attainable is not None and summary["auc"] is not None:
        ratio = (summary["auc"] - 0.5) / (attainable - 0.5)
        rows.append(("attainable AUC", f"{attainable:.4f} (reached {ratio:.1%} of it above 0.5)"))
    rows.append(("test logloss", f"{summary['logloss']:.4f}"))
    rows += [
        (shown, "undefined" if summary[name] is None else f"{summary[name]:.4f}")
        for name, shown in _FURTHER.items()
        if name in summary
    ]
    if "gauc" in summary:
        left_out = f"{summary['gauc_left_out']:,} of one class left out"
        groups = f"over {summary['gauc_groups']:,} groups, {left_out}"
        rows.append(("test GAUC", f"{readable_auc(summary['gauc'])} {groups}"))
        if summary["gauc_unknown_samples"]:
            unknown = f"{summary['gauc_unknown_samples']:,} samples"
            rows.append(("not in GAUC", f"{unknown} whose id is missing, rare or unseen"))
    best = f"{readable_auc(summary['best_auc'])} in epoch {summary['best_epoch']}"
    chosen = f"{best}, chosen on the {summary['selected_on']} part"
    if summary["selected_on"] == "test":
        chosen += " itself: optimistic"
    rows.append(("best test AUC", chosen))
    if summary["logistic_regression"] is not None:
        rows.append(("test AUC of LR", _regression(summary["logistic_regression"])))
    if summary["stopped_early"]:
        rows.append(("stopped early", f"after epoch {summary['epochs']}"))
    if summary["clipped_share"] is not None:
        rows.append(("rows clipped", f"{summary['clipped_share']:.2%} of the rows in the batches"))
    if summary["skipped_rows"]:
        rows.append(("rows skipped", f"{summary['skipped_rows']:,}, gradients not finite"))
    if summary["skipped_batches"]:
        skipped = f"{summary['skipped_batches']:,} of {summary['steps']:,}, losses not finite"
        rows.append(("batches skipped", skipped))
    rows += [
        ("samples/s", f"{summary['samples_per_second']:,.0f}"),
        ("training time", f"{summary['train_seconds']:.1f} s"),
        ("peak memory", f"{readable_bytes(summary['peak_memory_bytes'])} in one process"),
        ("tables", f"{plan} on {summary['world_size']} x {summary['device']}"),
        ("results", str(folder.path)),
        ("learning curve", str(folder.curve)),
        ("checkpoints", str(folder.checkpoints)),
    ]
    return table(rows)


def _regression(found: dict[str, Any]) -> str:
    return (
        f"{readable_auc(found['test_auc'])}, logloss {found['test_logloss']:.4f}: logistic "
        f"regression on the same features, {found['seconds']:.1f} s"
    )


def _peak_memory(processes: Processes) -> int:
    """Largest peak of any process, in bytes; see `peak_memory_bytes`."""
    peak = peak_memory_bytes(processes.device)
    largest = torch.tensor(peak, dtype=torch.int64, device=processes.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
