"""What came out of each run, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from stampede.engine.console import readable_metric
from stampede.engine.report.run_records import RunRecord

_HEADER = (
    "run", "network", "batch size", "epochs", "test AUC", "best test AUC", "best epoch",
    "chosen on", "test logloss", "rows clipped", "samples/s", "training time",
)  # fmt: skip


def result_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Header and a row for each run; empty cells where a run has not ended."""
    return list(_HEADER), [_row(run) for run in runs]


def _row(run: RunRecord) -> list[str]:
    known = [run.label, str(run.config.get("model.name", "")), f"{run.batch_size:,}"]
    summary = run.summary
    if not summary:
        return [*known, *[""] * (len(_HEADER) - len(known))]
    clipped = summary.get("clipped_share")
    return [
        *known,
        str(summary["epochs"]),
        readable_metric(summary["auc"]),
        readable_metric(summary["best_auc"]),
        str(summary["best_epoch"]),
        summary["selected_on"],
        f"{summary['logloss']:.4f}",
        "" if clipped is None else f"{clipped:.2%}",
        f"{summary['samples_per_second']:,.0f}",
        f"{summary['train_seconds']:,.1f} s",
    ]
