"""The layout of TorchRec's and MLPerf's Criteo readers.

A set of samples is three files: `*_dense.npy` float32 `[n, numbers]`, `*_sparse.npy` int32 or int64
`[n, fields]`, `*_labels.npy` int32 `[n, 1]`.
"""

from stampede.data.npy_layout.exporting import export
from stampede.data.npy_layout.importing import import_npy

__all__ = ["export", "import_npy"]
