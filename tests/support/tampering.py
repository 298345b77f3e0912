"""Prepared folders changed after they were written: vocabularies, checksums."""

import polars as pl

from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST, Manifest
from stampede.files import file_entry


def swap_users(folder):
    """Two users of a prepared folder have each other's row, and no checksum of a file says so."""
    path = folder / LEARNED_FOLDER / "user.parquet"
    frame = pl.read_parquet(path)
    # Others may have links to it.
    path.unlink()
    frame[[1, 0, *range(2, len(frame))]].write_parquet(path)


def sign_learned(folder):
    """Give the manifest checksums of what was learned that are right, as someone may who lies."""
    path = folder / MANIFEST
    manifest = Manifest.model_validate_json(path.read_bytes())
    learned = [file_entry(folder / entry.name, folder) for entry in manifest.learned]
    text = manifest.model_copy(update={"learned": learned}).model_dump_json()
    # Others may have links to it.
    path.unlink()
    path.write_text(text)
