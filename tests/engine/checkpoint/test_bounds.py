"""How much a checkpoint's manifest may hold: what real ones need, and no more than is harmless."""

import hashlib
import json

import pytest

from stampede.engine.checkpoint import Checkpoints, bounds, changes, read_manifest
from stampede.engine.checkpoint.layout import ChunkEntry, TensorEntry
from stampede.engine.checkpoint.manifest import TableEntry, as_text, weights_key, weights_name
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.models import table_name
from support.checkpoints import small_job, values_of, write_checkpoint
from support.guarded import guarded
from support.jobs import small_config


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoints/epoch_0001")


def fill(checkpoint, key, filling):
    """Sign a manifest with this text as one of its values, taking no memory that stays behind."""
    values = {**values_of(checkpoint), key: "@"}
    text = json.dumps(values, sort_keys=True).replace('"@"', filling)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(f'{text[:-1]}, "sha256": "{digest}"}}')


def as_many(value, opening="[", closing="]"):
    """As many of these as there may be."""
    own = value.count(",") + value.count("[") + value.count("{")
    count = (bounds._MOST_VALUES - 500) // (own + 1)
    return opening + ", ".join([value] * count) + closing


def keys_of(value, count):
    return "{" + ", ".join(f'"{number:08d}": {value}' for number in range(count)) + "}"


CHUNK = {"offsets": [0, 0], "sizes": [9, 9], "file": "a", "start": 0, "bytes": 1 << 40}
TENSOR = {"dtype": "float32", "size": [9, 9], "chunks": "@"}

FILLINGS = {
    "lists": ("config", lambda: f'{{"a": {as_many("[1]")}}}'),
    "mappings": ("config", lambda: f'{{"a": {as_many(json.dumps({"a": {}}))}}}'),
    "no files": ("files", lambda: as_many("1")),
    "no tensors": ("tensors", lambda: keys_of("1", bounds._MOST_VALUES - 500)),
    "parts that do not fit": (
        "tensors",
        lambda: json.dumps({"a": TENSOR}, sort_keys=True).replace(
            '"@"', as_many(json.dumps(CHUNK, sort_keys=True))
        ),
    ),
    "no tables": ("tables", lambda: keys_of("{}", (bounds._MOST_VALUES - 500) // 2)),
    "unknown keys": ("data", lambda: keys_of("1", bounds._MOST_VALUES - 500)),
    "keys": ("config", lambda: keys_of("1", bounds._MOST_VALUES - 500)),
    "long keys": ("config", lambda: f'{{"{"x" * 100_000}": {keys_of("1", 90_000)}}}'),
    "a wide character": (
        "config",
        lambda: json.dumps({"a": "\U0001f600" + "x" * (bounds.MOST_BYTES - (1 << 20))}),
    ),
}


@pytest.mark.parametrize("name", FILLINGS)
def test_a_manifest_that_is_as_large_as_may_be_takes_little_memory(checkpoint, tmp_path, name):
    key, filling = FILLINGS[name]
    fill(checkpoint, key, filling())
    config = small_config(tmp_path)
    with guarded(tmp_path, RunFolderError) as said:
        changes(checkpoint, config, None)
    assert len(said) == 1


def test_a_manifest_of_lists_is_not_read(checkpoint):
    """15 million of them, in 45 MB."""
    (checkpoint / "manifest.json").write_text('{"format": 2, "x": [' + "[]," * 15_000_000 + "[]]}")
    with guarded(checkpoint, RunFolderError, memory=60 << 20) as said:
        read_manifest(checkpoint)
    assert "manifest.json is larger than any" in said[0]
    (checkpoint / "manifest.json").write_text('{"format": 2, "x": [' + "[]," * 3_000_000 + "[]]}")
    with guarded(checkpoint, RunFolderError, memory=60 << 20) as said:
        read_manifest(checkpoint)
    assert "a manifest of 9,000,024 bytes and 6,000,004 values, at most" in said[0]


def tensors_of(field, ranks, rows=1_000_000, columns=12):
    """Weights and two moments of a table, by rows over so many ranks."""
    each = -(-rows // ranks)
    chunks = [
        ChunkEntry(
            offsets=[first, 0],
            sizes=[min(each, rows - first), columns],
            file=f"__{rank}_0.distcp",
            start=10**9,
            bytes=10**8,
        )
        for rank, first in enumerate(range(0, rows, each))
    ]
    entry = TensorEntry(dtype="float32", size=[rows, columns], chunks=chunks)
    weights = weights_key(field)
    moments = (f"fused.{weights_name(field)}.{moment}" for moment in ("exp_avg", "exp_avg_sq"))
    return {name: entry for name in (weights, *moments)}


def test_a_plan_of_thousands_of_tables_on_hundreds_of_ranks(checkpoint):
    """The largest tables lie on all ranks, the others on one each."""
    fields = [f"some_field_{number:04d}" for number in range(3000)]
    columns = {"embedding": [0, 10], "first_order": [10, 11], "padding": [11, 12]}
    whole = read_manifest(checkpoint)
    sizes = dict.fromkeys(fields, 1_000_000)
    tensors = {}
    for number, field in enumerate(fields):
        tensors |= tensors_of(field, 512 if number < 30 else 1)
    large = whole.model_copy(update={
        "tables": {
            table_name(field): TableEntry(field=field, rows=1_000_000, columns=columns)
            for field in fields
        },
        "data": whole.data.model_copy(update={"vocabulary_sizes": sizes}),
        "files": [
            whole.files[0].model_copy(update={"name": f"__{rank}_0.distcp", "bytes": 10**13})
            for rank in range(512)
        ],
        "tensors": tensors,
        "world_size": 512,
    })  # fmt: skip
    (checkpoint / "manifest.json").write_text(as_text(large))
    assert read_manifest(checkpoint) == large


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "_MOST_VALUES", 100)
    with small_job(tmp_path) as (here, job, config, data, target):
        checkpoints = Checkpoints(target, job, config, data, here)
        checkpoints.save(Progress(epoch=1, step=7))
        with pytest.raises(TrainingStoppedError, match=r"bytes and [\d,]+ values, at most 25,165"):
            checkpoints.wait()
        assert [*target.iterdir()] == []
