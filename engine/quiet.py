"""Silence for the libraries' start-up messages, which users can do nothing about."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Show only errors of torch, torchrec and fbgemm; call before they are imported."""
    for name in ("torchrec", "fbgemm_gpu", "torch", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
