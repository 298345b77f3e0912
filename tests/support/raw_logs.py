"""Small logs as text, and what is read of them."""

import numpy as np
import polars as pl

from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema

SCHEMA = {
    "label": "y",
    "ids": {"user": {}, "slot": {"encode": "integer", "size": 10}},
    "numbers": ["x"],
    "weight": "w",
    "time": {"column": "t", "format": "%Y-%m-%d"},
}
HEADER = "y,user,slot,x,w,t"
GOOD = "1,anna,3,0.5,1,2024-01-31"


def log_of(path, **changes):
    return RawLog(Schema.model_validate({**SCHEMA, **changes}), [path])


def write(path, lines, end="\n"):
    path.write_bytes(end.join(lines).encode() + end.encode())
    return path


def read(log, policy="error", aside=None):
    bad = BadRows(policy, aside, "--set on_bad_row=skip to leave such rows out")
    chunks = list(log.chunks(bad))
    frame = pl.concat([chunk.frame for chunk in chunks])
    numbers = np.concatenate([chunk.numbers for chunk in chunks])
    return frame, numbers, bad.count
