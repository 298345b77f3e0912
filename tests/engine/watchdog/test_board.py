"""What ranks tell each other of themselves."""

import threading
from dataclasses import replace

import torch.distributed as dist

from stampede.engine.pulse import Pulse
from stampede.engine.watchdog.board import Board
from stampede.engine.watchdog.standing import Standing
from support.waiting import wait_for

AHEAD = Standing(9, beats=31, step=5, stage="adding up the loss", still_seconds=60.0, hangs=True)


BEHIND = replace(AHEAD, beats=30, stage="computing", place="engine/step.py:9 in f")


def test_standings_on_the_board():
    store, pulses = dist.HashStore(), [Pulse(), Pulse()]
    published = [0, 0]

    def standing_of(rank):
        def standing():
            published[rank] += 1
            return Standing(published[rank], pulses[rank].beats, pulses[rank].step, "computing")

        return standing

    boards = [Board(store, rank, 2, 0.02, standing_of(rank)) for rank in range(2)]
    try:
        pulses[1].beat("computing", 7)
        boards[0].read(True)
        seen = wait_for(boards[0].others)
        assert seen[1].standing.step == 7 and not seen[1].silent
        assert [board.is_first() for board in boards] == [True, False]
        boards[1].close()
        assert wait_for(lambda: boards[0].others()[1].silent)
    finally:
        for board in boards:
            board.close()


def test_a_store_that_does_not_answer_keeps_nobody_waiting():
    released = threading.Event()

    class Gone:
        sets = 0

        def set(self, key, value):
            self.sets += 1
            if self.sets > 1:
                released.wait(60)

    board = Board(Gone(), 0, 2, 0.02, lambda: AHEAD)
    try:
        board.read(True)
        assert board.is_first()
        assert board.others() is None
    finally:
        released.set()
        board.close()
