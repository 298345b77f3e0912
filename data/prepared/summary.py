"""A prepared folder in a few lines."""

from __future__ import annotations

import textwrap
from pathlib import Path

from stampede.data.prepared.manifest import PARTS, read_manifest
from stampede.data.raw.missing_marks import sentence


def prepared_summary(folder: Path) -> str:
    """Rows, fields and size, for a person."""
    manifest = read_manifest(folder)
    rows = [f"  {part:<12}{manifest.rows(part):>16,} rows" for part in PARTS]
    ids = sum(entry.rows for entry in manifest.fields)
    size = sum(
        entry.bytes
        for shards in manifest.parts.values()
        for shard in shards
        for entry in shard.files.values()
    )
    rows.append(f"  {len(manifest.fields)} id fields with {ids:,} rows of tables together")
    rows.append(f"  {len(manifest.numbers)} numbers; {size / 1e6:,.0f} MB")
    if "features" in manifest.source:
        features = f"features: {manifest.source['features']}"
        rows += textwrap.wrap(features, 98, initial_indent="  ", subsequent_indent="    ")
    if manifest.bad_rows:
        rows.append(f"  {manifest.bad_rows:,} bad rows left out, see {folder / 'bad_rows.jsonl'}")
    if marks := manifest.source.get("missing_marks"):
        rows.append(f"  {sentence(marks)}")
    return "\n".join([str(folder), *rows])
