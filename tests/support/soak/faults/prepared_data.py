"""Files of the prepared data that vanish or change."""

import re

from support.soak.damages import damage, mended
from support.soak.faults.kind import Meeting, kind


@kind("data file vanished", 14, 2, begun=True)
def data_file_vanished(case):
    with mended(case.data):
        path = case.a_file(case.data)
        path.unlink()
        yield Meeting(rf"({re.escape(path.name)}: No such file|no prepared data here)")


@kind("data shard changed", 14, 2, begun=True)
def data_shard_changed(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "flipped", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: its content has changed \(SHA-256 differs\)")


@kind("data shard truncated", 6, 2, begun=True)
def data_shard_truncated(case):
    with mended(case.data):
        path = case.a_file(case.data, "*.npy")
        damage(path, "truncated", case.draw)
        yield Meeting(rf"{re.escape(path.name)}: ")
