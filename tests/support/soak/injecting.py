"""Injects faults, and checks what is promised of them."""

import re
from dataclasses import dataclass

from support.soak.cases import EVERY, STOPPED_AFTER, Case
from support.soak.runs import continued_after, newest_step


@dataclass(frozen=True)
class Outcome:
    """What a fault has cost.

    Attributes:
        again: steps that were done again.
        seconds: until the launcher ended that met it.
    """

    again: int
    seconds: float


def inject(kind, base, number):
    """Let a fault happen to a run of its own, mend it, and let the run come to its end.

    Raises:
        AssertionError: something was not as promised.
    """
    case = Case(base, number, kind.ranks, kind.begun)
    done = STOPPED_AFTER if kind.begun else 0
    with kind.inject(case) as meeting:
        case.processes.start(case.arguments(*meeting.overrides), meeting.disturbance, meeting.rank)
        met = meeting.meanwhile(case.processes) if meeting.meanwhile else None
        ended = case.processes.end()
    met = met or ended
    assert met.status == kind.status, (met.status, met.said)
    assert re.search(meeting.says, met.said), (meeting.says, met.said)
    assert ("Traceback" in met.said) == kind.traceback, met.said
    again = _again(done, ended.said)
    if ended.status != 0:
        if ended.place is not None and ended.place.done is not None:
            done = ended.place.done
        saved = newest_step(case.run) or 0
        case.processes.start(case.arguments())
        ended = case.processes.end()
        assert ended.status == 0 and "Traceback" not in ended.said, ended.said
        assert continued_after(ended.said) == ([saved] if saved else []), ended.said
        assert kind.loses or saved == done
        again = max(again, done - saved)
    case.check_end()
    # A checkpoint may be written while the next steps are taken, and one may be damaged.
    assert 0 <= again <= 3 * EVERY
    return Outcome(again, met.seconds)


def _again(done, said):
    """Steps that a run did again that had come so far."""
    return max((done - step for step in continued_after(said)), default=0)
