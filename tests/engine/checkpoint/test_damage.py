"""Damaged checkpoints: found by length and checksum, said, and the one before is used."""

import json

import pytest
import torch

from stampede.engine.checkpoint import (
    DamagedCheckpointError,
    newest_whole,
    read_manifest,
    read_tensors,
    tensors,
    verify,
)
from stampede.engine.checkpoint.progress import Progress
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from support.checkpoints import (
    WEIGHTS,
    damaged_on_all_ranks,
    sign,
    values_of,
    weights_of_table,
    write_checkpoint,
)
from support.ranks import run_ranks


def tensors_file(path):
    return next(path.glob("*.distcp"))


def shortened(path):
    file = tensors_file(path)
    file.write_bytes(file.read_bytes()[:-1])


def flipped(path):
    file = tensors_file(path)
    content = bytearray(file.read_bytes())
    # Within the numbers of the table, where nothing but the checksum can tell.
    content[content.index(weights_of_table().numpy().tobytes()) + 9] ^= 4
    file.write_bytes(content)


def vanished(path):
    tensors_file(path).unlink()


def emptied(path):
    (path / "manifest.json").write_text("")


def cut(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def changed(path):
    text = (path / "manifest.json").read_text()
    assert '"step": 5' in text
    (path / "manifest.json").write_text(text.replace('"step": 5', '"step": 4'))


def manifest_vanished(path):
    (path / "manifest.json").unlink()


DAMAGES = [shortened, flipped, vanished, emptied, cut, changed, manifest_vanished]


def at(step):
    return Progress(epoch=step // 5, step=step)


def whole(folder, newest=10):
    write_checkpoint(folder / "epoch_0001", at(5))
    return write_checkpoint(folder / "epoch_0002", at(newest))


def chosen(folder):
    with processes("cpu") as here:
        return newest_whole(folder, here)


def test_a_whole_checkpoint(tmp_path):
    path = whole(tmp_path)
    verify(path)
    assert chosen(tmp_path) == path
    found = torch.zeros(7, 12)
    read_tensors(path, {"model": {WEIGHTS: found}}, alone=True)
    assert torch.equal(found, weights_of_table())


def test_without_checkpoints_there_is_none(tmp_path):
    assert chosen(tmp_path) is None
    assert chosen(tmp_path / "nowhere") is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_used_and_it_is_said(tmp_path, capsys, damage):
    path = whole(tmp_path, newest=5 if damage is changed else 10)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"epoch_0002: damaged checkpoint \("):
        verify(path)
    assert chosen(tmp_path) == tmp_path / "epoch_0001"
    said = capsys.readouterr().out
    assert "epoch_0002: damaged checkpoint (" in said
    assert "epoch_0001 is used" in said
    # It must not be among the newest that are kept, nor in the way of a new one of its name.
    assert {p.name for p in tmp_path.iterdir()} == {"epoch_0001", ".epoch_0002.damaged"}
    assert chosen(tmp_path) == tmp_path / "epoch_0001"
    assert capsys.readouterr().out == ""


def test_an_older_one_that_is_damaged_is_no_matter(tmp_path):
    path = whole(tmp_path)
    shortened(tmp_path / "epoch_0001")
    assert chosen(tmp_path) == path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_damaged_checkpoints_only_does_not_begin_anew(tmp_path, damage):
    path = write_checkpoint(tmp_path / "epoch_0001", at(5))
    damage(path)
    for _ in range(2):
        with pytest.raises(RunFolderError, match=r"epoch_0001: damaged.*\n.*run.overwrite=true"):
            chosen(tmp_path)
        # Left alone: it may be mended.
        assert path.exists()


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not flipped])
def test_who_reads_tensors_of_a_damaged_checkpoint_is_told(tmp_path, damage):
    path = write_checkpoint(tmp_path / "epoch_0001")
    damage(path)
    with pytest.raises(RunFolderError, match=r"epoch_0001: damaged checkpoint \(.*delete it"):
        read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)


def test_every_changed_bit_of_a_manifest_is_found(tmp_path):
    path = write_checkpoint(tmp_path / "epoch_0001")
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


def test_all_ranks_use_the_same(tmp_path):
    flipped(whole(tmp_path))
    results = run_ranks(2, damaged_on_all_ranks, str(tmp_path))
    assert results[0] == results[1]
    used, said = results[0]
    assert used == "epoch_0001"
    assert "__0_0.distcp: No such file" in said


def test_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunFolderError, match=r"is no checkpoint.*write a folder such as"):
            read_manifest(path)


def as_first_format(path):
    values = values_of(path)
    for key in ("format", "versions", "files", "tensors"):
        del values[key]
    (path / "manifest.json").write_text(json.dumps(values))


def as_next_format(path):
    sign(path, {**values_of(path), "format": 3, "more": 1})


@pytest.mark.parametrize(("change", "number"), [(as_first_format, 0), (as_next_format, 3)])
def test_another_format_is_refused_and_not_passed_over(tmp_path, change, number):
    path = whole(tmp_path)
    change(path)
    said = (
        rf"epoch_0002: a checkpoint of format {number}, .* knows 1 and 2 only; use the version that"
    )
    with pytest.raises(RunFolderError, match=said):
        read_manifest(path)
    with pytest.raises(RunFolderError, match=said):
        chosen(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("lack", [MemoryError("no more"), RuntimeError("DefaultCPUAllocator: no")])
def test_a_lack_of_memory_is_no_damage(tmp_path, monkeypatch, lack):
    def lacking(*_):
        raise lack

    path = write_checkpoint(tmp_path / "epoch_0001")
    monkeypatch.setattr(tensors.Reader, "read_data", lacking)
    with pytest.raises(MemoryError, match=str(lack)):
        read_tensors(path, {"model": {WEIGHTS: torch.zeros(7, 12)}}, alone=True)
