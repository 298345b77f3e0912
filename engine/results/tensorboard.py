"""What TensorBoard gets: every number of the lines of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Events:
    """The events of a run, in a folder that is made with the first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Add the numbers of a line under its part or kind; raises an OSError."""
        if self._writer is None:
            # Imported here: only rank 0 logs, and the import takes a tenth of a second.
            from torch.utils.tensorboard import SummaryWriter

            # Events of repeated steps replace the old ones.
            self._writer = SummaryWriter(str(self._folder), purge_step=line["step"])
        group = line.get("part", line["kind"])
        for name, value in _numbers(line):
            self._writer.add_scalar(f"{group}/{name}", value, line["step"])

    def close(self) -> None:
        """Write the last events; the next line begins a new file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as failure:
                reason = failure.strerror or failure
                tqdm.write(f"{writer.log_dir}: the last events cannot be written ({reason})")


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line other than counts, named `section/name`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, float):
            yield name, value
