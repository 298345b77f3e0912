"""Files of the prepared data that vanish or change."""

import os
import re
from functools import partial

from support.soak.cases import STEPS
from support.soak.damages import damage, mended
from support.soak.disturbances import (
    at_step,
)
from support.soak.faults.kind import Meeting, kind
from support.tampering import set_time


@kind("data file vanished", 14, 2, begun=True)
def data_file_vanished(case):
    with mended(case.data):
        path = case.a_file(case.data)
        path.unlink()
        yield Meeting(rf"({re.escape(path.name)}: is absent|no prepared data here)")


@kind("data shard changed", 14, 2, begun=True)
def data_shard_changed(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "flipped", case.draw)
        # Up to a day after the preparation or, as copies that keep their time have it, before.
        set_time(path, int(case.draw.uniform(-86400, 86400) * 1e9))
        yield Meeting(rf"{re.escape(path.name)}: its content has changed \(SHA-256 differs\)")


@kind("data shard truncated", 6, 2, begun=True)
def data_shard_truncated(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "truncated", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: ")


@kind("data file shortened while it is read", 8, 2)
def data_file_shortened(case):
    with mended(case.data):
        path = case.a_file(case.data, "train-*.npy")
        # The last batch was read before the last step but one.
        disturbance = partial(
            at_step,
            case.draw.randrange(1, STEPS - 3),
            os.truncate,
            path,
            case.draw.randrange(path.stat().st_size),
        )
        yield Meeting(
            rf"{re.escape(path.name)}: was shortened to [\d,]+ bytes while it was being read",
            ("data.residence=disk",),
            disturbance,
        )
