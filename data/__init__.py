"""From click logs, real or synthetic, to global batches."""

from stampede.data.batch import Batch
from stampede.data.errors import DataError
from stampede.data.global_batches import GlobalBatches
from stampede.data.samples import Dataset, Part, Samples
from stampede.data.synthetic import SyntheticClicks

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "GlobalBatches",
    "Part",
    "Samples",
    "SyntheticClicks",
]
