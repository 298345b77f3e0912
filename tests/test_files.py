"""Files and folders are whole or not there, also after a kill; checksums."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from stampede import files
from stampede.files import (
    FileEntry,
    append,
    check_files,
    delete_folder,
    difference,
    file_entry,
    hidden,
    make_folder,
    publish_folder,
    recover_folders,
    write_file,
)
from support.full_disk import files_of_at_most
from support.waiting import HANG


class UserError(Exception):
    pass


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_file_or_a_line_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    for write in (write_file, append):
        write_file(path, "first\n")
        with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
            write(path, b"x" * 11)
        assert path.read_text() == "first\n" and names(tmp_path) == {"a"}
    append(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


HELD = """
import sys, time
from pathlib import Path
from stampede.files import make_folder

def fill(folder):
    (folder / sys.argv[2]).touch()
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)

print(make_folder(Path(sys.argv[1]), fill, OSError))
"""


@pytest.mark.parametrize("first_one_ends", ["whole", "killed"])
def test_a_second_process_waits_for_the_first(tmp_path, first_one_ends):
    def start(name):
        command = [sys.executable, "-c", HELD, tmp_path / "a", name, tmp_path / "go on"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    first = start("one")
    while not (tmp_path / ".a.unfinished" / "one").exists():
        time.sleep(0.01)
    second = start("two")
    assert "waiting for another process" in second.stderr.readline()
    assert not (tmp_path / ".a.unfinished" / "two").exists()
    if first_one_ends == "killed":
        first.kill()
        first.wait()
    (tmp_path / "go on").touch()
    answers = [process.communicate(timeout=HANG)[0].strip() for process in (first, second)]
    whole = first_one_ends == "whole"
    assert answers == (["True", "False"] if whole else ["", "True"])
    assert names(tmp_path / "a") == {"one" if whole else "two"}
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "x").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    said = r"a: cannot be written \(No space left on device\); free some space, or choose"
    with pytest.raises(UserError, match=said):
        make_folder(tmp_path / "new" / "a", fill, UserError)
    assert names(tmp_path) == set()


def versions(folder):
    """A folder, and a newer version that is written and not published."""
    path = folder / "a"
    for place, name in ((path, "old"), (hidden(path, "tmp"), "new")):
        place.mkdir()
        (place / name).touch()
    return path


def test_names_of_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    path, synced = versions(tmp_path), []
    real = os.fsync
    monkeypatch.setattr(
        files.os, "fsync", lambda n: (synced.append(os.readlink(f"/proc/self/fd/{n}")), real(n))
    )
    publish_folder(hidden(path, "tmp"), path)
    assert synced == [str(hidden(path, "tmp")), str(tmp_path)]


@pytest.mark.parametrize(
    ("action", "call", "left"),
    [
        ("replace", 1, "old"),
        ("replace", 2, "old"),
        ("replace", 3, "new"),
        ("delete", 1, "old"),
        ("delete", 2, None),
    ],
)
def test_a_kill_leaves_a_whole_folder_or_none(tmp_path, monkeypatch, action, call, left):
    path, calls = versions(tmp_path), []

    def killed(real):
        def called(*arguments, **options):
            calls.append(real)
            if len(calls) == call:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return called

    monkeypatch.setattr(files.os, "replace", killed(os.replace))
    monkeypatch.setattr(files.shutil, "rmtree", killed(shutil.rmtree))
    with pytest.raises(KeyboardInterrupt):
        publish_folder(hidden(path, "tmp"), path) if action == "replace" else delete_folder(path)
    monkeypatch.undo()
    recover_folders(tmp_path, re.compile("a"))
    assert names(tmp_path) == ({"a"} if left else set())
    assert not left or names(path) == {left}


def test_tidying_knows_its_own_names(tmp_path):
    others = {".b.tmp", ".epoch_0001.notes.tmp", ".tmp", "a.tmp", ".x.replaced"}
    for name in [*others, ".a.tmp", ".a.deleted"]:
        (tmp_path / name).mkdir()
    recover_folders(tmp_path, re.compile("a"))
    assert names(tmp_path) == others


def test_what_a_manifest_says_of_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_bytes(b"abc")
    entry = file_entry(tmp_path / "sub/a", tmp_path)
    assert (entry.name, entry.bytes) == ("sub/a", 3)
    assert entry.sha256 == hashlib.sha256(b"abc").hexdigest()
    check_files(tmp_path, [entry])
    (tmp_path / "sub/a").write_bytes(b"abd")
    check_files(tmp_path, [entry], content=False)
    with pytest.raises(ValueError, match=r"sub/a: its content has changed \(SHA-256 differs\)"):
        check_files(tmp_path, [entry])
    (tmp_path / "sub/a").write_bytes(b"ab")
    with pytest.raises(ValueError, match="sub/a: 2 bytes instead of 3"):
        check_files(tmp_path, [entry], content=False)
    (tmp_path / "sub/a").unlink()
    assert difference(tmp_path / "sub/a", entry) == "No such file or directory"
    os.mkfifo(tmp_path / "sub/a")
    assert difference(tmp_path / "sub/a", entry) == "is not a file"


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", ".a", "a/b/c", ""])
def test_names_outside_of_the_folder(name):
    with pytest.raises(ValueError, match="is not the name of a file in this folder"):
        FileEntry(name=name, bytes=0, sha256="")
