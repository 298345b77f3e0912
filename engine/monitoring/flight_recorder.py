"""What torch's flight recorder knows of the collectives of this process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from stampede.engine.whole_files import write_whole

# Of NCCL, which a build of torch may lack, and of gloo. Each has a recorder of its own, which holds
# the last 2000 collectives (`TORCH_FR_BUFFER_SIZE`).
_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}

# Collectives that are told.
_TOLD = 20


def dump_file(folder: Path, rank: int) -> Path:
    """What the recorders of a rank held when the run hung, in the folder of the run."""
    return folder / "flight_recorder" / f"rank_{rank}.json"


def recorded() -> dict[str, dict[str, Any]]:
    """All that is recorded, by backend, as torch describes it; it may block for ever."""
    dumps = {backend: getattr(c10d, name, None) for backend, name in _DUMPS.items()}
    # As JSON: torch's own tool reads pickles, but none of gloo, whose groups it does not find.
    return {
        backend: json.loads(dump(True, False))
        for backend, dump in dumps.items()
        if dump is not None
    }


def write_dump(path: Path, dump: dict[str, dict[str, Any]]) -> None:
    """Write what `recorded` gave.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dump))


def last_collectives(dump: dict[str, dict[str, Any]]) -> str:
    """The newest collectives of what `recorded` gave, a line each, the newest last.

    Numbers of a group's collectives are the same on all its ranks: the rank that the others wait
    for has come less far, or is in another one.
    """
    entries = [entry for of_backend in dump.values() for entry in of_backend.get("entries", [])]
    if not entries:
        return "torch's flight recorder has no collectives of this process"
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return "\n".join(["last collectives, the newest last:", *map(_line, entries[-_TOLD:])])


def _line(entry: dict[str, Any]) -> str:
    """For example `  group 0 collective 57: gloo:all_reduce of 1 Double, 12.1 s ago, under way`."""
    sizes = [" x ".join(map(str, size)) or "1" for size in entry["input_sizes"][:3]]
    kinds = ", ".join(map(" ".join, zip(sizes, entry["input_dtypes"], strict=False)))
    ago = time.time() - entry["time_created_ns"] / 1e9
    done = entry["retired"] or entry["state"] == "completed"
    return (
        f"  group {entry['process_group'][0]} collective {entry['collective_seq_id']}: "
        f"{entry['profiling_name']} of {kinds or 'nothing'}, {ago:.1f} s ago, "
        f"{'done' if done else 'under way'}"
    )
