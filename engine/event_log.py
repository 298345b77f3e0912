"""The numbers of a run as TensorBoard shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm


class EventLog:
    """Events for TensorBoard, which a run does not need.

    Args:
        folder: for them, made when there is one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Add the numbers of a line of `metrics.jsonl`.

        Raises:
            OSError: they cannot be written.
        """
        if self._writer is None:
            # Events of steps that are done again replace the old ones.
            self._writer = SummaryWriter(str(self._folder), purge_step=line["step"])
        group = line.get("part", line["kind"])
        for name, value in _numbers(line):
            self._writer.add_scalar(f"{group}/{name}", value, line["step"])

    def close(self) -> None:
        """Write what is left; where that cannot be done it is said."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as failure:
                reason = failure.strerror or failure
                tqdm.write(f"{writer.log_dir}: the last events cannot be written ({reason})")


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Those of a line that are no counts, with the names of its sections before theirs."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, float):
            yield name, value
