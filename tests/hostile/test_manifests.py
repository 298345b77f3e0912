"""Prepared folders from people who mean harm: manifests and what was learned."""

import json
import shutil

import pytest
import torch
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.apply import apply_learned
from stampede.data.learning.learned import LEARNED
from stampede.data.options import WritingOptions
from stampede.data.prepared.manifest import LEARNED_FOLDER, MANIFEST, prepared_summary
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.verify import verify
from support.fuzzing import NUMBERS, VALUES, changed_bytes, changed_trees, fuzz
from support.guarded import guarded
from support.mixed_log import write_mixed
from support.prepared import write_small
from support.preparing import prepared
from support.tampering import sign_learned

CASES = [120, pytest.param(10_000, marks=pytest.mark.soak)]

SNIPPETS = [b"\0", b"\xff", b"NaN", b"Infinity", b"-", b"1e999", b"[" * 5000, b'{"a":' * 5000,
            b"\\ud800", b"9" * 5000, b",", b"null", b"\xef\xbb\xbf", b"//"]  # fmt: skip


@st.composite
def json_files(draw, trees):
    content = json.dumps(draw(trees)).encode()
    return content if draw(st.integers(0, 3)) else draw(changed_bytes(content, SNIPPETS))


def whole_read(folder):
    """Everything that opens a prepared folder."""
    prepared_summary(folder)
    dataset = open_prepared(folder)
    for part in (dataset.train, dataset.validation, dataset.test):
        if part is not None:
            part.read(torch.arange(min(part.rows, 1000)))
    verify(folder)


@pytest.mark.parametrize("cases", CASES)
def test_manifests(tmp_path, cases):
    folder = write_small(tmp_path / "box/data")
    # What a name that leads out of the folder would find: an array that fits.
    for canary in (tmp_path / "box/canary", tmp_path / "canary", folder.parent / "canary.npy"):
        shutil.copy(folder / "train-0-ids.npy", canary)
    (folder / "a").mkdir()
    manifest = json.loads((folder / MANIFEST).read_text())
    names = [entry["name"] for entry in manifest["parts"]["train"][0]["files"].values()]
    hostile = st.sampled_from([
        "../canary", "../../canary", str(tmp_path / "canary"), "a/../../canary", "a/../canary.npy",
        "./../canary", "a//../../canary", "/dev/zero", "/proc/self/mem", ".", "..", "a", "a/b/c",
        "manifest.json", "x" * 300, "é", "\n../canary", "../canary\n", *names,
    ])  # fmt: skip
    trees = changed_trees(
        [manifest],
        st.sampled_from(NUMBERS) | hostile | VALUES,
        ["ids", "numbers", "label", "offsets_0", "values_1", "train", "test", "rows", "name"],
    )

    def check(content):
        (folder / MANIFEST).write_bytes(content)
        with guarded(tmp_path, DataError) as said:
            whole_read(folder)
        return said[0] if said else None

    seen = fuzz(json_files(trees), check, cases)
    assert seen["accepted"] > cases / 100 and len(seen) > 8, seen


@pytest.mark.parametrize("cases", CASES)
def test_what_was_learned(tmp_path, cases):
    """Applied to a log, after it was changed."""
    write_mixed(tmp_path)
    log = str(tmp_path / "log.csv")
    folder = prepared(tmp_path / "data", "table", log, schema=str(tmp_path / "schema.yaml"))
    shutil.copy(next((folder / LEARNED_FOLDER).glob("*user*")), tmp_path / "canary")
    learned = folder / LEARNED_FOLDER / LEARNED
    saved = json.loads(learned.read_text())
    hostile = ["../canary", "../../canary", str(tmp_path / "canary"), "..", ".", "*", "*.parquet",
               "learned.json", "a\0b", *saved["vocabularies"].values()]  # fmt: skip
    trees = changed_trees(
        [saved], st.one_of(st.sampled_from(NUMBERS), st.sampled_from(hostile), VALUES),
        [*saved, *saved["schema_"], *saved["ranges"], "rows", "squares", "encode", "buckets"],
    )  # fmt: skip

    vocabulary = folder / LEARNED_FOLDER / "tags.parquet"
    intact = vocabulary.read_bytes()

    def check(case):
        learned.write_bytes(case[0])
        vocabulary.write_bytes(case[1])
        sign_learned(folder)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with guarded(tmp_path, DataError) as said:
            apply_learned(folder, log, WritingOptions(), tmp_path / "out")
        return said[0] if said else None

    assert check((learned.read_bytes(), intact)) is None
    changed = st.just(intact) | st.just(intact) | changed_bytes(intact)
    seen = fuzz(st.tuples(json_files(trees), changed), check, cases)
    assert seen["accepted"] > cases / 100 and len(seen) > 8, seen


def test_what_was_learned_without_a_label(tmp_path):
    write_mixed(tmp_path)
    log = str(tmp_path / "log.csv")
    folder = prepared(tmp_path / "data", "table", log, schema=str(tmp_path / "schema.yaml"))
    learned = folder / LEARNED_FOLDER / LEARNED
    saved = json.loads(learned.read_text())
    saved["schema_"]["label"] = None
    learned.write_text(json.dumps(saved))
    sign_learned(folder)
    with pytest.raises(DataError, match=r"damaged \(.*the schema names no label\)"):
        apply_learned(folder, log, WritingOptions(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
