"""Preparation of a log whose rows all have another id: does memory grow with the vocabulary?

    python benchmarks/many_ids.py

Counts of ids that have no room in `counts_gb`, here 0.25, lie on the disk. The peak is that of the
largest process; it counts pages of files that are mapped, too.
"""

from __future__ import annotations

import argparse
import shutil

import numpy as np
import polars as pl
from launched import run_program
from report import Report, command_line, markdown

_SCHEMA = "label: clicked\nids: {user: {min_count: 1}}\n"
# Rows that are drawn at a time.
_PIECE = 1 << 20


def many_ids(options: argparse.Namespace, report: Report) -> str:
    """Seconds and memory by the number of ids."""
    found = {}
    for ids in [100_000] if options.quick else options.ids:
        folder = options.folder / f"ids-{ids}"
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (folder / "schema.yaml").write_text(_SCHEMA)
        for start in range(0, ids, _PIECE):
            rows = np.arange(start, min(start + _PIECE, ids))
            # A permutation of the 32-bit numbers, so that the texts do not come in order.
            texts = [f"{row * 0x9E3779B1 % 2**32:08x}" for row in rows.tolist()]
            frame = pl.DataFrame({"clicked": (rows % 2).astype(np.int8), "user": texts})
            frame.write_parquet(logs / f"{start:012}.parquet")
        command = ["prepare", "table", f"{logs}/*.parquet", "--schema", folder / "schema.yaml"]
        command += ["--out", folder / "out", "--set", "split=random", "-s", "counts_gb=0.25"]
        done = run_program(["-m", "stampede", *command])
        found[ids] = done._asdict() | {"said": ""}
        report.add(prepared=found)
        shutil.rmtree(folder)
    table = [
        [f"{ids:,}", f"{one['processor_seconds']:.0f}", f"{one['peak_bytes'] / 1e9:.2f}"]
        for ids, one in found.items()
    ]
    return markdown(["rows, each with its own id", "processor s", "peak GB"], table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [1_000_000, 5_000_000, 20_000_000, 100_000_000]
    parser.add_argument("--ids", type=int, nargs="*", default=sizes)
    command_line(many_ids, parser=parser)
