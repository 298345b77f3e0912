"""Who hangs, and where."""

import threading
import time
from dataclasses import replace

import pytest

from stampede.engine.watchdog.standing import Standing, place_of
from stampede.engine.watchdog.verdict import Seen, find_culprits

AHEAD = Standing(9, beats=31, step=5, stage="adding up the loss", still_seconds=60.0, hangs=True)


BEHIND = replace(AHEAD, beats=30, stage="computing", place="engine/step.py:9 in f")


@pytest.mark.parametrize(
    "ranks, culprits, said",
    [
        ([AHEAD, BEHIND], [1], "rank 1 does not go on: at step 5, computing, for 60 s (engine"),
        ([replace(BEHIND, waits=True), BEHIND, AHEAD], [1], "rank 1 does not go on"),
        ([BEHIND, AHEAD, BEHIND], [0, 2], "ranks 0 and 2 do not go on: rank 0 at step 5, comp"),
        ([replace(AHEAD, waits=True)] * 2, [0, 1], "ranks 0 and 1 do not go on"),
        ([AHEAD, None], [1], "rank 1 is stopped, dead or out of reach: never heard of; the others "
         "wait at step 5, adding up the loss"),
        ([AHEAD, replace(BEHIND, ended=True, hangs=False)], [1], "rank 1 has left the training: at "
         "step 5, computing; the others wait at step 5, adding"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for(ranks, culprits, said):
    verdict = find_culprits({rank: Seen(standing) for rank, standing in enumerate(ranks)})
    assert verdict.ranks == culprits and verdict.reason.startswith(said)


def test_a_silent_rank_is_it_whatever_it_said_last():
    late = replace(AHEAD, beats=99, hangs=False)
    verdict = find_culprits({0: Seen(AHEAD), 1: Seen(late, silent=True), 2: Seen(BEHIND)})
    assert verdict.ranks == [1]
    assert "stopped, dead or out of reach: last heard of at step 5" in verdict.reason
    assert verdict.reason.endswith("the others wait at step 5, computing")


def test_nobody_hangs_while_a_rank_moves():
    assert find_culprits({0: Seen(AHEAD), 1: Seen(replace(BEHIND, hangs=False))}) is None


def test_nobody_waits_once_the_training_has_ended():
    ended = replace(AHEAD, ended=True)
    assert find_culprits({0: Seen(ended), 1: Seen(None), 2: Seen(ended)}) is None


def test_many_ranks_are_not_all_named():
    reason = find_culprits({rank: Seen(BEHIND) for rank in range(20)}).reason
    assert reason.startswith("ranks 0, 1, 2, 3, 4, 5, 6 and 7; and 12 more do not go on: rank 0 at")
    assert "rank 8" not in reason


def test_a_place_in_the_project_and_who_waits_there():
    woken = threading.Event()

    def sleep():
        woken.wait(60)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        place, waits = _settled(thread)
    finally:
        woken.set()
        thread.join()
    # The innermost frame is in a library, which waits for nobody elsewhere.
    assert "in sleep" in place and "test_verdict.py" in place and not waits
    assert place_of(-1) == ("", False)


def _settled(thread):
    deadline = time.monotonic() + 20
    while "in sleep" not in (found := place_of(thread.ident))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
