"""Which checkpoints a run keeps, which is the newest, damaged ones, and those from elsewhere."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist

from stampede.engine.checkpoint import retention, tensors
from stampede.engine.checkpoint.manifest import (
    DamagedCheckpointError,
    DataEntry,
    Manifest,
    TableEntry,
    as_text,
    read_manifest,
)
from stampede.engine.checkpoint.retention import (
    being_read,
    checkpoint_of,
    name_of,
    newest,
    newest_whole,
    prune,
    verify,
)
from stampede.engine.config import CheckpointSection
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.training.progress import Progress
from stampede.files import delete_folder, file_entry
from support.checkpoints import WEIGHTS, sign, values_of

TABLE = torch.arange(7 * 12, dtype=torch.float32).view(7, 12)


def write(folder, epoch, step, samples=0, read=None, state=None):
    """A checkpoint at a point of a run, without tensors unless they are given; its path."""
    reader = {"epoch": epoch if read is None else read, "samples": samples}
    progress = Progress(epoch=epoch, step=step, reader=reader)
    path = folder / name_of(progress)
    path.mkdir(parents=True)
    entries, names = {}, []
    if state:
        with processes("cpu"):
            entries, names = tensors.write_tensors(state, path, dist.group.WORLD)
    columns = {"embedding": [0, 10], "first_order": [10, 11], "padding": [11, 12]}
    data = DataEntry(
        vocabulary_sizes={"C1": 7}, vocabulary_sha256="", numbers=0, train_rows=5, test_rows=5
    )
    manifest = Manifest(
        versions={},
        progress=progress,
        data=data,
        world_size=1,
        config={"train": {"batch_size": 256}},
        tables={"t_C1": TableEntry(field="C1", rows=7, columns=columns)},
        files=[file_entry(path / name, path) for name in names],
        tensors=entries,
    )
    (path / "manifest.json").write_text(as_text(manifest))
    return path


def write_whole(folder, epoch=1, step=5):
    """A checkpoint with one table and little else."""
    state = {"model": {WEIGHTS: TABLE}, "dense": {"bias": {"step": torch.tensor(3.0)}}}
    return write(folder, epoch, step, state=state)


def read_table(path):
    found = torch.zeros(7, 12)
    tensors.read_tensors(path, {"model": {WEIGHTS: found}}, alone=True)
    return found


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_newest_has_the_most_steps_whatever_its_name(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    for epoch, step, samples, read, name in (
        (2, 20, 0, 2, "epoch_0002"),
        # All batches are trained on, but the epoch is not evaluated yet.
        (2, 30, 0, 3, "step_00000030"),
        (10, 100, 0, 10, "epoch_0010"),
        (1, 15, 8, 1, "epoch_0010"),
        (10, 105, 8, 10, "step_00000105"),
        # More digits than the name has room for.
        (10, 123_456_789, 8, 10, "step_123456789"),
        (11, 123_456_789, 0, 11, "epoch_0011"),
    ):
        write(tmp_path, epoch, step, samples, read)
        assert newest(tmp_path).name == name
    # What a kill in a save leaves does not count, and is removed when a run goes on.
    left = write(tmp_path, 13, 999_999_999).rename(tmp_path / ".epoch_0013.tmp")
    assert newest(tmp_path).name == "epoch_0011"
    assert newest_whole(tmp_path).name == "epoch_0011" and not left.exists()
    # One that cannot be read may be newer; who reads it is told.
    (write(tmp_path, 5, 50) / "manifest.json").write_text("{}")
    assert newest(tmp_path).name == "epoch_0005"
    # So may one whose manifest is lost.
    (tmp_path / "epoch_0012").mkdir()
    assert newest(tmp_path).name == "epoch_0012"


def fill(folder, epochs):
    """Two checkpoints within each epoch, and one at its end."""
    for epoch in range(epochs):
        for step in (3, 6):
            write(folder, epoch, 10 * epoch + step, samples=8)
        write(folder, epoch + 1, 10 * (epoch + 1))


def test_the_newest_the_best_and_every_third_epoch_are_kept(tmp_path):
    fill(tmp_path, 8)
    # What cannot be read is left alone and does not count.
    (write(tmp_path, 9, 70) / "manifest.json").write_text("{}")
    prune(tmp_path, CheckpointSection(keep=2, keep_every=3), best_epoch=2)
    kept = {"epoch_0002", "epoch_0003", "epoch_0006", "epoch_0009"}
    assert names(tmp_path) == {*kept, "step_00000076", "epoch_0008"}
    assert checkpoint_of(tmp_path, 3) == tmp_path / "epoch_0003"
    assert checkpoint_of(tmp_path, 4) is None
    # A step whose number is that of the best epoch is none.
    write(tmp_path, 8, 82, samples=8)
    prune(tmp_path, CheckpointSection(keep=1), best_epoch=8)
    assert names(tmp_path) == {"epoch_0008", "epoch_0009", "step_00000082"}


def test_a_checkpoint_in_use_is_kept_until_it_is_closed(tmp_path):
    fill(tmp_path, 2)
    handles = [being_read(lambda: tmp_path / "epoch_0001")[1] for _ in range(2)]
    for handle in handles:
        prune(tmp_path, CheckpointSection(keep=1), best_epoch=0)
        assert names(tmp_path) == {"epoch_0001", "epoch_0002"}
        handle.close()
    prune(tmp_path, CheckpointSection(keep=1), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002"}


def test_one_that_is_deleted_meanwhile_is_neither_read_nor_the_newest(tmp_path, monkeypatch):
    fill(tmp_path, 2)
    choices = iter(["epoch_0009", "epoch_0002"])
    path, held = being_read(lambda: tmp_path / next(choices))
    held.close()
    assert path.name == "epoch_0002"
    assert being_read(lambda: tmp_path / "epoch_0009") == (tmp_path / "epoch_0009", None)
    lock = retention._lock

    def deleted_before_the_lock(handle, how):
        shutil.rmtree(tmp_path / "epoch_0001", ignore_errors=True)
        return lock(handle, how)

    monkeypatch.setattr(retention, "_lock", deleted_before_the_lock)
    choices = iter(["epoch_0001", "epoch_0002"])
    path, held = being_read(lambda: tmp_path / next(choices))
    held.close()
    assert path.name == "epoch_0002"

    def deleted_meanwhile(path):
        if path.name == "step_00000003":
            delete_folder(path)
        return read_manifest(path)

    monkeypatch.setattr(retention, "read_manifest", deleted_meanwhile)
    assert newest(tmp_path).name == "epoch_0002"


def test_copies_under_other_names_are_left_alone(tmp_path):
    fill(tmp_path, 2)
    others = {"step_00000016_backup", "epoch_archive", "epoch_9", "step_9999999", "epoch_0002 2"}
    for name in others:
        shutil.copytree(tmp_path / "epoch_0002", tmp_path / name)
    (tmp_path / "epoch_archive/manifest.json").unlink()
    assert newest(tmp_path).name == "epoch_0002"
    prune(tmp_path, CheckpointSection(keep=2), best_epoch=0)
    assert names(tmp_path) == {"epoch_0002", "step_00000016", *others}


def flipped(content):
    # Within the numbers of the table, where nothing but the checksum can tell.
    place = content.index(TABLE.numpy().tobytes()) + 9
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def damage(path, pattern, change):
    (file,) = path.glob(pattern)
    content = file.read_bytes()
    file.unlink()
    if change:
        file.write_bytes(change(content))


@pytest.mark.parametrize(
    "pattern, change",
    [
        ("*.distcp", lambda content: content[:-1]),
        ("*.distcp", flipped),
        ("*.distcp", None),
        ("manifest.json", lambda content: content[: len(content) // 2]),
        ("manifest.json", None),
    ],
    ids=["shortened", "flipped", "vanished", "manifest cut", "manifest vanished"],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, capsys, pattern, change):
    write_whole(tmp_path)
    path = write_whole(tmp_path, 2, 10)
    assert newest_whole(tmp_path) == path
    damage(path, pattern, change)
    if change is not flipped:
        with pytest.raises(RunFolderError, match=r"epoch_0002: damaged checkpoint \(.*delete it"):
            read_table(path)
    with pytest.raises(DamagedCheckpointError, match=r"epoch_0002: damaged checkpoint \("):
        verify(path)
    assert newest_whole(tmp_path) == tmp_path / "epoch_0001"
    said = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in said and "epoch_0001 is used" in said
    # It must not be among the newest that are kept, nor in the way of a new one of its name.
    assert names(tmp_path) == {"epoch_0001", ".epoch_0002.damaged"}
    damage(tmp_path / "epoch_0001", pattern, change)
    for _ in range(2):
        with pytest.raises(RunFolderError, match=r"epoch_0001: damaged.*\n.*run.overwrite=true"):
            newest_whole(tmp_path)
        # Left alone: it may be mended.
        assert (tmp_path / "epoch_0001").exists()


def test_lack_of_memory_does_not_count_as_damage(tmp_path, monkeypatch):
    def lacking(*_):
        raise RuntimeError("DefaultCPUAllocator: no")

    monkeypatch.setattr(tensors.Reader, "read_data", lacking)
    with pytest.raises(MemoryError, match="DefaultCPUAllocator: no"):
        read_table(write_whole(tmp_path))


def test_every_changed_bit_of_a_manifest_is_found(tmp_path):
    path = write_whole(tmp_path)
    content = (path / "manifest.json").read_bytes()
    values = json.loads(content)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (path / "manifest.json").write_bytes(changed)
        try:
            assert json.loads(changed) == values
            read_manifest(path)
        except (ValueError, AssertionError):
            with pytest.raises(DamagedCheckpointError, match="damaged checkpoint"):
                read_manifest(path)


def test_an_unknown_format_is_refused_rather_than_skipped(tmp_path):
    write(tmp_path, 0, 1)
    path = write(tmp_path, 1, 5)
    sign(path, {**values_of(path), "format": 3, "more": 1})
    said = r"epoch_0001: the checkpoint has format 3, but .* reads only 2; use the version"
    with pytest.raises(RunFolderError, match=said):
        newest_whole(tmp_path)
    assert path.exists()


class Harm:
    """What unpickling executes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zipped(content):
    """As torch saves it."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def put_into_entry(path, content):
    """Let the table's entry be these bytes, all checksums right."""
    values = values_of(path)
    (chunk,) = values["tensors"][f"model.{WEIGHTS}"]["chunks"]
    file = path / chunk["file"]
    chunk["start"], chunk["bytes"] = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    sign(path, values)


def test_nothing_is_executed(tmp_path):
    path, harm = write_whole(tmp_path), Harm(tmp_path / "harm")
    # torch's own reader would unpickle them.
    for name in (".metadata", "__0.metadata"):
        (path / name).write_bytes(pickle.dumps(harm))
    put_into_entry(path, zipped(TABLE + 1))
    assert torch.equal(read_table(path), TABLE + 1)
    for form in (pickle.dumps(harm), zipped(harm), zipped({"a": harm}), zipped(torch.ones(7, 11))):
        put_into_entry(path, form)
        with pytest.raises(DamagedCheckpointError, match="damaged checkpoint"):
            read_table(path)
    assert not (tmp_path / "harm").exists()
