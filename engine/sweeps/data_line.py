"""What data the figures of a sweep are of, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stampede.engine.config import Config
from stampede.engine.sweeps.results import Result
from stampede.engine.sweeps.sweep import Sweep

_MOST = 3


def what_data(sweep: Sweep, found: Sequence[Result]) -> str:
    """Kind, path and split of the data, rows, and the part that selected; empty without a trial."""
    done = [outcome for one in found for outcome in one.done]
    if not done:
        return ""
    # Seeds change no data.
    firsts = [one.done[0].trial for one in found if one.done]
    data = _listed(_described(sweep.config_of(trial)) for trial in firsts)
    rows = _listed(f"{outcome.summary['rows']['train']:,}" for outcome in done)
    tested = _listed(f"{outcome.summary['rows']['test']:,}" for outcome in done)
    parts = _listed(outcome.selected_on for outcome in done)
    return f"Data: {data}; {rows} training rows, {tested} test rows; selected on the {parts} part."


def _described(config: Config) -> str:
    data = config.data
    said = [data.kind]
    path = getattr(data, "path", "")
    if path:
        said.append(path if isinstance(path, str) else ", ".join(path))
    if getattr(data, "split", ""):
        said.append(f"split {data.split}")
    return ", ".join(said)


def _listed(texts: Iterable[str]) -> str:
    different = list(dict.fromkeys(texts))
    more = len(different) - _MOST
    return " or ".join(different[:_MOST]) + (f" or {more} more" if more > 0 else "")
