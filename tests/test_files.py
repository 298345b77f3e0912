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
    read_json,
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

    def appended(path, content):
        append(path.parent, path.name, content)

    for write in (write_file, appended):
        write_file(path, "first\n")
        with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
            write(path, b"x" * 11)
        assert path.read_text() == "first\n" and names(tmp_path) == {"a"}
    append(tmp_path, "a", b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


@pytest.fixture
def victim(tmp_path):
    """A folder of somebody else's, with a file."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "file").write_text("precious")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "precious"


def test_links_within_a_folder_of_ours_are_not_followed(tmp_path, victim):
    ours = tmp_path / "ours"
    ours.mkdir()
    append(ours, "logs/a", b"1\n")
    append(ours, "logs/a", b"2\n")
    assert (ours / "logs/a").read_bytes() == b"1\n2\n"
    (ours / "file").symlink_to(victim / "file")
    (ours / "folder").symlink_to(victim)
    os.mkfifo(ours / "pipe")
    for name, words in (
        ("file", "is a link.*/ours/file'"), ("folder/file", "is a link.*/ours/folder'"),
        ("folder/new", "is a link.*/ours/folder'"), ("pipe", "/ours/pipe'"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=words) as raised:
            append(ours, name, b"x")
        assert "is a link, which is not followed; remove it" in str(raised.value) or name == "pipe"
    # The folder itself may be reached through one.
    (tmp_path / "linked").symlink_to(ours)
    append(tmp_path / "linked", "logs/a", b"3\n")


def test_an_unfinished_folder_that_is_a_link_is_replaced(tmp_path, victim):
    (tmp_path / ".a.unfinished").symlink_to(victim)
    assert make_folder(tmp_path / "a", lambda folder: (folder / "new").touch(), UserError)
    assert names(tmp_path / "a") == {"new"} and not (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("text", ["1e400", "NaN", "-Infinity", '"\\ud800"', "[1", "", "\\"])
def test_json_that_could_not_be_written_again_is_refused(tmp_path, text):
    (tmp_path / "a").write_text(f"[{text}]")
    if text:
        with pytest.raises(ValueError):
            read_json(tmp_path / "a")
    (tmp_path / "a").write_text('{"a": [1.5, "\\u00e4"]}')
    assert read_json(tmp_path / "a") == {"a": [1.5, "ä"]}
    with pytest.raises(OSError, match="has 22 bytes; the limit is 21"):
        read_json(tmp_path / "a", 21)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a file"):
        read_json(tmp_path / "pipe")


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
