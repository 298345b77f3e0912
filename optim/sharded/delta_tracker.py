"""Tables with CowClip under TorchRec's delta tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.model_tracker.model_delta_tracker import (
    ModelDeltaTracker,
    ModelDeltaTrackerTrec,
)
from torchrec.distributed.model_tracker.types import TrackingMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.optim.rules import SGD, RowWiseAdagrad
from stampede.optim.update_settings import UpdateSettings


def check_tracking(record_fn: Callable[..., None], tables: Mapping[str, UpdateSettings]) -> None:
    """Refuse a tracker that would miss rows, or look for states that tables do not have."""
    tracker = getattr(record_fn, "__self__", None)
    if not isinstance(tracker, ModelDeltaTracker):
        return
    moving = [t for t, settings in tables.items() if settings.moves_untouched_rows]
    if moving:
        raise ValueError(
            f"table {moving[0]!r} with CowClip: with rows='all' every row changes in every "
            "step, but TorchRec's delta tracker records only the rows that were looked up; "
            "write rows='touched', or leave the table out (fqns_to_skip) and publish it whole"
        )
    mode = getattr(tracker, "_mode", None)
    for table, settings in tables.items():
        rule, needed = settings.rule, None
        if mode in (TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD):
            needed = None if isinstance(rule, RowWiseAdagrad) else "CowClipRowWiseAdagrad"
        elif mode == TrackingMode.MOMENTUM_LAST and rule == SGD():
            needed = "CowClipAdam or another optimizer with a state"
        if needed is not None:
            raise ValueError(
                f"table {table!r} with CowClip: TorchRec's delta tracker in mode {mode.name} "
                f"needs {needed}; write it, or track with mode ID_ONLY"
            )


def record_states(
    record_fn: Callable[..., None],
    ours: type[nn.Module],
    features: KeyedJaggedTensor,
    output: Tensor,
    kernel: Any,
) -> None:
    """Hand the first state of looked-up rows, or its norm, to a tracker, table by table.

    Args:
        ours: the class of tables with CowClip; other tables have no states to hand over.
    """
    tables, tracker = kernel.emb_module, getattr(record_fn, "__self__", None)
    if not (isinstance(tables, ours) and isinstance(tracker, ModelDeltaTrackerTrec)):
        record_fn(features, output, kernel)
        return
    states = [states[0] for states in tables.split_optimizer_states()]
    parts = features.split([1] * len(features.keys()))
    for part, table in zip(parts, tables.feature_table_map, strict=True):
        found = states[table][part.values()]
        tracker.store.append(
            batch_idx=tracker.curr_batch_idx,
            fqn=tracker.feature_to_fqn[part.keys()[0]],
            ids=part.values(),
            states=found if found.ndim == 1 else found.norm(dim=1),
        )
