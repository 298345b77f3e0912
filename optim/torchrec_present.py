"""A better sentence where TorchRec meets an optimizer of ours without our sharders."""

from __future__ import annotations

import sys


def explain_to_torchrec() -> None:
    """Where TorchRec is in use, let it say what is missing; called when an optimizer is made.

    TorchRec need not be installed, and whoever forgot our sharders has not imported them either.
    """
    if "torchrec.distributed.utils" in sys.modules:
        from stampede.optim.sharded.unmatched import explain_unmatched_optimizers

        explain_unmatched_optimizers()
