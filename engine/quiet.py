"""Silence for the libraries' start-up messages, which users can do nothing about."""

from __future__ import annotations

import logging
import threading
import warnings

# Of TensorBoard: what fails in it is raised where events are written.
_SPOKEN_FOR = "_AsyncWriterThread"


def quiet_libraries() -> None:
    """Show only errors of torch, torchrec and fbgemm; call before they are imported.

    Tracebacks of threads whose errors are raised elsewhere are not shown.
    """
    for name in ("torchrec", "fbgemm_gpu", "torch", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    show = threading.excepthook
    threading.excepthook = lambda failure: (
        None if type(failure.thread).__name__ == _SPOKEN_FOR else show(failure)
    )
