"""Checkpoints that are damaged."""

from support.soak.damages import DAMAGES, damage, mended
from support.soak.faults.kind import Meeting, kind


@kind("checkpoint truncated", 14, 0, begun=True)
def checkpoint_truncated(case):
    yield from _newest_checkpoint_damaged(case, "truncated")


@kind("bit of a checkpoint flipped", 20, 0, begun=True)
def checkpoint_flipped(case):
    yield from _newest_checkpoint_damaged(case, "flipped")


@kind("file of a checkpoint vanished", 8, 0, begun=True)
def checkpoint_vanished(case):
    yield from _newest_checkpoint_damaged(case, "vanished")


def _newest_checkpoint_damaged(case, how):
    path = case.checkpoint
    damage(case.a_file(path), how, case.draw)
    yield Meeting(rf"{path.name}: damaged checkpoint \(.*\n  set aside as .* is used")


@kind("all checkpoints damaged", 6, 2, begun=True)
def all_checkpoints_damaged(case):
    with mended(case.run):
        for path in (case.run / "checkpoints").iterdir():
            damage(case.a_file(path), case.draw.choice(DAMAGES), case.draw)
        yield Meeting(r"damaged checkpoint \((.|\n)*no other checkpoint is left in")
