"""Checkpoints from elsewhere: nothing in them is executed, no file outside is read, no memory
filled, whoever made them knowing all checksums."""

import io
import os
import pickle
import zipfile

import pytest
import torch

from stampede.engine.checkpoint import changes, newest, read_manifest, read_tensors, verify
from stampede.engine.errors import RunFolderError
from stampede.engine.tables import read_field
from support.checkpoints import WEIGHTS, sign, values_of, weights_of_table, write_checkpoint
from support.entries import TENSOR, put_into_entry, put_no_random_state, refusal, zipped
from support.guarded import guarded
from support.jobs import run_small, small_config
from support.ranks import run_ranks


class Harm:
    """What unpickling executes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoints/epoch_0001")


def read(path):
    found = torch.zeros(7, 12)
    read_tensors(path, {"model": {WEIGHTS: found}}, alone=True)
    return found


def refused(path, said):
    """All ways to read it are refused with a sentence."""
    for way in (lambda: read(path), lambda: read_field(path, "C1")):
        with guarded(path, RunFolderError) as sentences:
            way()
        assert len(sentences) == 1
        assert str(path) in sentences[0] and said in sentences[0]


def test_what_the_helpers_make_is_read(checkpoint):
    sign(checkpoint, values_of(checkpoint))
    verify(checkpoint)
    assert torch.equal(read(checkpoint), weights_of_table())


def test_metadata_of_torch_are_never_unpickled(checkpoint, tmp_path):
    # Without it torch's own reader would be at a loss; with it, it executes.
    assert not (checkpoint / ".metadata").exists()
    for name in (".metadata", "__0.metadata"):
        (checkpoint / name).write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with guarded(checkpoint):
        assert torch.equal(read(checkpoint), weights_of_table())
    assert not (tmp_path / "harm").exists()
    (checkpoint / "manifest.json").unlink()
    refused(checkpoint, "damaged checkpoint (manifest.json: No such file")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("form", [pickle.dumps, zipped, lambda harm: zipped({"a": harm})])
def test_a_hostile_entry_is_not_executed(checkpoint, tmp_path, form):
    put_into_entry(checkpoint, form(Harm(tmp_path / "harm")))
    refused(
        checkpoint, "not a zip file" if form is pickle.dumps else "something else than a tensor"
    )
    assert not (tmp_path / "harm").exists()


def test_an_entry_in_torchs_old_format_is_refused(checkpoint):
    stream = io.BytesIO()
    torch.save(weights_of_table(), stream, _use_new_zipfile_serialization=False)
    put_into_entry(checkpoint, stream.getvalue())
    refused(checkpoint, "not a zip file")


def test_a_compressed_entry_is_refused(checkpoint):
    # A few kilobytes that would become a gigabyte.
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(zipped(weights_of_table()))) as plain,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for part in plain.infolist():
            with packed.open(part.filename, "w", force_zip64=True) as file:
                if part.filename.endswith("data/0"):
                    for _ in range(1024):
                        file.write(bytes(1 << 20))
                else:
                    file.write(plain.read(part))
    put_into_entry(checkpoint, stream.getvalue())
    refused(checkpoint, "not as torch saves a tensor")


@pytest.mark.parametrize("value", [
    torch.ones(7, 11), torch.ones(6, 12), torch.ones(84), torch.ones(1, 1).expand(7, 12)[:, :5],
    {"a": 1}, [1, 2], "text", torch.ones(7, 12).to_sparse(), None,
])  # fmt: skip
def test_an_entry_that_is_another_tensor_is_refused(checkpoint, value):
    put_into_entry(checkpoint, zipped(value))
    refused(checkpoint, "damaged checkpoint")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_of_no_random_generator_is_refused_on_all_ranks(tmp_path, ranks):
    run_ranks(ranks, run_small, tmp_path, [], ranks)
    checkpoint = newest(tmp_path / "small/checkpoints")
    put_no_random_state(checkpoint, ranks - 1)
    overrides = ["checkpoint.resume=auto", "train.epochs=2"]
    where = " on rank 1" if ranks > 1 else ""
    assert run_ranks(ranks, refusal, tmp_path, overrides, ranks) == ranks * [
        f"{checkpoint}: damaged checkpoint (state of the random generator: Invalid mt19937 "
        f"state{where}); delete it to use the one before"
    ]


def test_a_huge_view_takes_no_memory(checkpoint):
    put_into_entry(checkpoint, zipped(torch.ones(1).expand(1 << 30, 1 << 10)))
    with guarded(checkpoint, RunFolderError):
        read(checkpoint)


def without(*keys):
    def change(values):
        for key in keys:
            del values[key]

    return change


def in_chunk(**changes):
    def change(values):
        values["tensors"][TENSOR]["chunks"][0].update(changes)

    return change


def in_tensor(**changes):
    def change(values):
        values["tensors"][TENSOR].update(changes)

    return change


def file_named(name):
    def change(values):
        values["files"][0]["name"] = name
        for tensor in values["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name

    return change


def chunk_in(name):
    return in_chunk(file=name)


def huge(values):
    """10^12 rows, said everywhere."""
    values["data"]["vocabulary_sizes"]["C1"] = values["tables"]["t_C1"]["rows"] = 10**12
    tensor = values["tensors"][TENSOR]
    tensor["size"][0] = tensor["chunks"][0]["sizes"][0] = 10**12


def huge_in_chunks(values):
    """Many chunks that are all the same bytes of the file."""
    values["data"]["vocabulary_sizes"]["C1"] = values["tables"]["t_C1"]["rows"] = 7000
    tensor = values["tensors"][TENSOR]
    tensor["size"][0] = 7000
    (chunk,) = tensor["chunks"]
    tensor["chunks"] = [{**chunk, "offsets": [7 * i, 0]} for i in range(1000)]


def huge_without_chunks(values):
    huge(values)
    values["tensors"][TENSOR]["chunks"] = []


def huge_table(values):
    values["data"]["vocabulary_sizes"]["C1"] = values["tables"]["t_C1"]["rows"] = 10**12


def twice(values):
    values["files"].append(values["files"][0])


def other_column(values):
    values["tables"]["t_C1"]["columns"]["padding"][1] = 1 << 40


def no_embedding(values):
    del values["tables"]["t_C1"]["columns"]["embedding"]


def no_width(values):
    values["tables"]["t_C1"]["columns"]["embedding"] = [0, 0]


def renamed_table(values):
    values["tables"]["../C1"] = values["tables"].pop("t_C1")


ORDER = {"rows": 5, "shuffle": "block", "seed": 0, "window_rows": 0, "block_rows": 4}


LAST = {"auc": 0.5, "logloss": 0.6, "attainable_auc": None, "samples": 9}


def progress(**changes):
    def change(values):
        values["progress"].update(changes)

    return change


def deep(values):
    for _ in range(100_000):
        values["config"] = {"a": values["config"]}


CHANGES = {
    "an absolute path": (file_named("/etc/passwd"), "files.0.name"),
    "a path out of the folder": (file_named("../../canary"), "files.0.name"),
    "a hidden path out": (file_named("a/../../canary"), "files.0.name"),
    "a file that is not listed": (chunk_in("../canary"), "is not one of the files"),
    "a chunk elsewhere": (chunk_in("manifest.json"), "is not one of the files"),
    "two files of one name": (twice, "names must differ"),
    "beyond the end": (in_chunk(start=1 << 40), "ends after the end"),
    "longer than the file": (in_chunk(bytes=1 << 40), "ends after the end"),
    "before the beginning": (in_chunk(start=-1), "greater than or equal to 0"),
    "a length below zero": (in_chunk(bytes=-1), "greater than or equal to 0"),
    "no number": (in_chunk(start="0"), "valid integer"),
    "10^12 rows": (huge, "larger than its part of the file"),
    "10^12 rows of the table": (huge_table, "its tensor is of another size"),
    "10^12 rows in no file": (huge_without_chunks, "do not cover it"),
    "bytes used many times": (huge_in_chunks, "more than the whole"),
    "2^40 columns": (other_column, "its tensor is of another size"),
    "a hole": (in_chunk(sizes=[6, 12]), "do not cover it"),
    "an overlap": (in_chunk(offsets=[1, 0]), "do not cover it"),
    "fewer dimensions": (in_chunk(offsets=[0]), "other dimensions"),
    "many dimensions": (in_tensor(size=[1] * 100), "at most 8"),
    "a type that is none": (in_tensor(dtype="os.system"), "Input should be"),
    "no columns of the embedding": (no_embedding, "lacks the columns"),
    "columns of nothing": (no_width, "its columns are not those"),
    "a table of another name": (renamed_table, "tables"),
    "no progress": (without("progress"), "progress"),
    "no format": (without("format"), "damaged"),
    "no tensors": (without("tensors"), "tensors"),
    "unknown keys": (lambda values: values.update(more=1), "more"),
    "steps below zero": (lambda values: values["progress"].update(step=-1), "progress.step"),
    "a text as an AUC": (progress(last={**LAST, "auc": "x"}), "progress.last.test.auc"),
    "half of an evaluation": (progress(last={"auc": 0.5}), "progress.last.test.logloss"),
    "half of GAUC": (progress(last={**LAST, "gauc": 0.5}), "progress.last.test.gauc_groups"),
    "a text as samples": (progress(reader={"samples": "x"}), "progress.reader.samples"),
    "an order of no block": (progress(reader={"order": {**ORDER, "block_rows": 3}}), "power of"),
    "an order of nothing": (progress(reader={"order": {"rows": 5}}), "progress.reader.order"),
    "unknown settings": (progress(reader={"settings": {"seed": 1}}), "progress.reader.settings"),
    "an unknown plateau": (progress(plateau={"more": 1}), "progress.plateau.more"),
    "a text as the rate": (progress(plateau={"fraction": "x"}), "progress.plateau.fraction"),
    "unknown progress": (lambda values: values["progress"].update(f=1), "progress.f"),
    "endless seconds": (lambda v: v["progress"].update(train_seconds=float("inf")), "progress"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_means_harm_is_refused(checkpoint, tmp_path, name):
    change, said = CHANGES[name]
    (tmp_path / "canary").write_bytes(next(checkpoint.glob("*.distcp")).read_bytes())
    values = values_of(checkpoint)
    change(values)
    sign(checkpoint, values, files=False)
    refused(checkpoint, said)
    with pytest.raises(RunFolderError):
        verify(checkpoint)
    assert newest(checkpoint.parent) == checkpoint


def test_keys_do_nothing_to_a_terminal(checkpoint):
    values = values_of(checkpoint)
    values["tensors"]["\x1b[2J\nall is well"] = {}
    sign(checkpoint, values)
    with pytest.raises(RunFolderError, match=r"x1b\[2J\\nall is well") as refusal:
        read_manifest(checkpoint)
    assert str(refusal.value).isprintable()


def test_keys_of_another_configuration_do_nothing_to_a_terminal(checkpoint, tmp_path):
    values = values_of(checkpoint)
    values["config"]["train"]["\x1b[2J\rall is well"] = 1
    sign(checkpoint, values)
    with pytest.raises(RunFolderError, match=r"train\.\\x1b\[2J\\rall is well: 1") as refusal:
        changes(checkpoint, small_config(tmp_path), None)
    assert str(refusal.value).replace("\n", "").isprintable()


def test_a_deeply_nested_manifest_is_refused(checkpoint):
    text = (checkpoint / "manifest.json").read_text()
    for levels in (150, 990, 100_000):
        nested = '{"a": ' * levels + "1" + "}" * levels
        (checkpoint / "manifest.json").write_text(
            text.replace('"config": {', f'"config": {{"b": {nested},')
        )
        with guarded(checkpoint, RunFolderError) as sentences:
            read_manifest(checkpoint)
        assert "damaged checkpoint" in sentences[0]


def test_a_link_out_of_the_folder_is_refused(checkpoint, tmp_path):
    file = next(checkpoint.glob("*.distcp"))
    file.rename(tmp_path / "canary")
    file.symlink_to(tmp_path / "canary")
    refused(checkpoint, "is not a file of its own")
    with guarded(checkpoint, RunFolderError) as sentences:
        verify(checkpoint)
    assert "is not a file of its own" in sentences[0]


def test_a_pipe_does_not_hang(checkpoint):
    file = next(checkpoint.glob("*.distcp"))
    file.unlink()
    os.mkfifo(file)
    values = values_of(checkpoint)
    refused(checkpoint, "is not a file of its own")
    (checkpoint / "manifest.json").unlink()
    os.mkfifo(checkpoint / "manifest.json")
    assert values
    refused(checkpoint, "is not a file of its own")


def test_a_huge_manifest_takes_no_memory(checkpoint):
    with (checkpoint / "manifest.json").open("ab") as file:
        file.truncate(10**12)
    refused(checkpoint, "larger than any")
