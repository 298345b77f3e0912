"""Which rank a run waits for, from what the ranks have told about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stampede.engine.watchdog.standing import Standing

# Ranks that a sentence names.
_NAMED = 8


class Seen(NamedTuple):
    """What is known of a rank.

    Attributes:
        standing: the newest one; None if it has not published any.
        silent: whether it is so old that the rank must be stopped or dead.
    """

    standing: Standing | None
    silent: bool = False


@dataclass(frozen=True)
class Verdict:
    """Who keeps the others waiting.

    Attributes:
        ranks: these, in their order.
        reason: a sentence without its full stop.
    """

    ranks: list[int]
    reason: str


def find_culprits(ranks: Mapping[int, Seen]) -> Verdict | None:
    """The ranks for which the others wait; None as long as one still moves, or if none waits.

    Args:
        ranks: all of them, this one among them.
    """
    heard = {
        rank: seen.standing for rank, seen in ranks.items() if seen.standing and not seen.silent
    }
    at_work = {rank: at for rank, at in heard.items() if not at.ended}
    if not at_work or not all(at.hangs for at in at_work.values()):
        return None
    first = min(at_work.values(), key=lambda at: at.beats)
    others = f"; the others wait at {_where(first)}"
    silent = {r: _last_word(seen.standing) for r, seen in sorted(ranks.items()) if r not in heard}
    if silent:
        state = "stopped, dead or out of reach"
        return Verdict(list(silent), _named(silent, f"is {state}", f"are {state}") + others)
    ended = {rank: f"at {_where(at)}" for rank, at in sorted(heard.items()) if at.ended}
    if ended:
        left = "left the training"
        return Verdict(list(ended), _named(ended, f"has {left}", f"have {left}") + others)
    behind = {rank: at for rank, at in sorted(at_work.items()) if at.beats == first.beats}
    # Ranks at the same place wait for those among them that do not wait for others.
    behind = {rank: at for rank, at in behind.items() if not at.waits} or behind
    described = {rank: _stillness(at) for rank, at in behind.items()}
    return Verdict(list(described), _named(described, "does not go on", "do not go on"))


def _named(described: Mapping[int, str], one: str, many: str) -> str:
    """For example `ranks 1 and 3 do not go on: rank 1 at ..; rank 3 at ..`."""
    ranks = list(described)
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}: {described[ranks[0]]}"
    shown = ranks[:_NAMED]
    parts = "; ".join(f"rank {rank} {described[rank]}" for rank in shown)
    more = f"; and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, shown[:-1]))} and {shown[-1]}{more} {many}: {parts}"


def _where(at: Standing) -> str:
    return f"step {at.step}, {at.stage}"


def _stillness(at: Standing) -> str:
    place = f" ({at.place})" if at.place else ""
    return f"at {_where(at)}, for {at.still_seconds:.3g} s{place}"


def _last_word(at: Standing | None) -> str:
    return "never heard of" if at is None else f"last heard of at {_where(at)}"
