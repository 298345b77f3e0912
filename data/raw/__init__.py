"""Raw click logs, read in chunks of typed rows."""

from stampede.data.raw.bad_rows import BadRow, BadRows
from stampede.data.raw.files import expand
from stampede.data.raw.log import Chunk, RawLog
from stampede.data.raw.scoring import scoring_log

__all__ = ["BadRow", "BadRows", "Chunk", "RawLog", "expand", "scoring_log"]
