"""A run that is out of memory ends with its plan's figures and what to lower."""

from __future__ import annotations

from types import TracebackType

from stampede.engine.checkpoint import newest
from stampede.engine.config import Config
from stampede.engine.lack_of_memory import LackOfMemoryError, lacks_memory, what_was_asked
from stampede.engine.planning.figures import MEMORY, Figures
from stampede.engine.planning.remedies import what_to_lower
from stampede.engine.planning.sizes import readable
from stampede.engine.processes import Processes
from stampede.engine.run_folder import RunFolder


class MemoryGuard:
    """Within it a lack of memory is a `LackOfMemoryError`, on the rank that has it.

    Nothing is exchanged: the other ranks may wait for this one somewhere else.

    Args:
        config: what is trained.
        processes: this process among all.
        folder: of the run.
    """

    def __init__(self, config: Config, processes: Processes, folder: RunFolder) -> None:
        self._config = config
        self._processes = processes
        self._folder = folder
        self._figures: Figures | None = None

    def plan(self, figures: Figures) -> None:
        """Be told what the plan asks of every rank, before anything is allocated."""
        self._figures = figures

    def __enter__(self) -> MemoryGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if failure is not None and lacks_memory(failure):
            # What rank 0 did for all of them fails on all.
            of_all = getattr(failure, "known_to_all_ranks", False)
            lack = LackOfMemoryError(self._sentence(failure, 0 if of_all else self._processes.rank))
            lack.known_to_all_ranks = of_all
            raise lack from None

    def _sentence(self, failure: BaseException, rank: int) -> str:
        pulse = self._processes.pulse
        where = f"at step {pulse.step}, {pulse.stage}" if pulse.step else f"while {pulse.stage}"
        lines = [f"rank {rank} is out of memory {where} ({what_was_asked(failure)})"]
        if self._figures is not None:
            parts = [
                f"{kind.replace('_', ' ')} {readable(self._figures.memory[kind][rank])}"
                for kind in MEMORY
            ]
            total = readable(self._figures.total_memory[rank])
            lines.append(f"its part of the plan: {', '.join(parts)}, {total} in all")
        on_gpu = self._processes.device.type == "cuda"
        tries = what_to_lower(self._config, self._figures, rank, pulse.stage, on_gpu)
        lines.append(f"Try {', '.join(tries[:-1])}, or {tries[-1]}")
        lines.append(self._kept())
        return "\n  ".join(lines)

    def _kept(self) -> str:
        path = newest(self._folder.checkpoints)
        if path is None:
            return "no checkpoint had been written yet"
        return f"{path} is kept; checkpoint.resume=auto continues from there"
