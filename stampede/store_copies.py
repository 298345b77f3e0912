# pyright: basic
"""A folder of this machine and its counterpart in an object store."""

from __future__ import annotations

import errno
import fcntl
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from stampede.files import hidden, new_file, read_json, remove, to_json, write_file
from stampede.store_access import PART_BYTES, StoreError, asking, content_id, in_parts, opened

# Files, and parts of large ones, that are copied at once.
_THREADS = 8


class SharedFolder:
    """A local folder, or the file "", and its counterpart in a store; for one process at a time.

    Attributes:
        record: of each file that was alike in both, `id` in the store and `here`, its state.
    """

    def __init__(self, url: str, here: Path) -> None:
        self._url, self._here = url, here
        self._about = hidden(here, "store")
        self.record: dict[str, Any] = {}

    def __enter__(self) -> SharedFolder:
        self._about.parent.mkdir(parents=True, exist_ok=True)
        self._lock = hidden(self._here, "copying").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with suppress(OSError, ValueError):
            self.record = read_json(self._about)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._note()
        finally:
            self._lock.close()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep others of this machine from the local files, also after this folder is closed.

        Raises a `StoreError` if another one keeps them.
        """
        with hidden(self._here, "writing").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reason = "is being written by another process of this machine; wait for its end"
                raise StoreError(errno.EBUSY, reason, self._url) from None
            try:
                yield
            finally:
                # Processes that were forked meanwhile hold it, too.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _note(self) -> None:
        write_file(self._about, to_json(self.record))

    def files(self) -> dict[str, Path]:
        """The local files by name, but for those that begin with a dot."""
        if self._here.is_file():
            return {"": self._here}
        found = [file for file in self._here.rglob("*") if file.is_file()]
        names = {str(file.relative_to(self._here)): file for file in found}
        return {name: file for name, file in names.items() if not _is_hidden(name)}

    def there(self) -> dict[str, Any]:
        """The files of the store by name, as its driver describes them."""
        with asking(self._url) as (fs, key):
            fs.invalidate_cache()
            found = fs.find(key, detail=True)
            # adlfs lists a file alone without its description.
            found = found if isinstance(found, dict) else {name: fs.info(name) for name in found}
            if found and all(_is_folder(name, one) for name, one in found.items()):
                # Perhaps there is a file beside them, which was not looked for.
                fs.invalidate_cache()
                found = {key: fs.info(key)}
        found = {name: one for name, one in found.items() if not _is_folder(name, one)}
        names = {name.removeprefix(key).lstrip("/"): one for name, one in found.items()}
        return {name: one for name, one in names.items() if not _is_hidden(name)}

    def compare(self) -> None:
        """Note where the store does not hold what was last copied."""
        there, files = self.there(), self.files()
        for name in self.record.keys() - there.keys():
            del self.record[name]
        for name in there.keys() & (self.record.keys() | files.keys()):
            identity = content_id(there[name])
            if self.record.get(name, {}).get("id") != identity:
                self.record[name] = {"id": identity}

    def is_ours(self, there: dict[str, Any]) -> bool:
        """Whether the store holds only what was copied from here, perhaps by a killed process."""
        if not there:
            return not self.record

        def is_known(name: str) -> bool:
            return self.record.get(name, {}).get("id") == content_id(there[name])

        return all(is_known(name) or self._begins_as(name) for name in there)

    def _begins_as(self, name: str) -> bool:
        """Whether a file of the store is a local one, to which lines may have been added since."""
        url, file = f"{self._url}/{name}" if name else self._url, self._here / name
        if not file.is_file():
            return False
        with opened(url) as one, file.open("rb") as other:
            while block := one.read(1 << 20):
                if other.read(len(block)) != block:
                    return False
        return True

    def download(
        self, keep: bool = False, without: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Bring the local files up to date.

        Args:
            keep: those that the store does not have.
            without: whether a file is not copied, by its name.
        """
        for last_try in (False, True):
            try:
                self._download(self.there(), keep, without)
                return
            except StoreError as failure:
                # A run has deleted an old checkpoint in the meantime.
                if last_try or failure.errno != errno.ENOENT:
                    raise

    def _download(self, found: dict[str, Any], keep: bool, without: Callable[[str], bool]) -> None:
        there = {name: one for name, one in found.items() if not _is_unfinished(name, found)}
        files = self.files()
        # What somebody has deleted here must not be deleted there.
        for name in self.record.keys() - files.keys():
            if "here" in self.record[name] or not keep:
                del self.record[name]
        for name in sorted(files.keys() - there.keys(), key=_stage, reverse=True):
            if not keep:
                remove(files[name])
                self.record.pop(name, None)

        def is_old(name: str) -> bool:
            if keep or name not in files:
                # What is recorded without a file will be replaced, see `forgotten`.
                return name not in files and name not in self.record
            known = self.record.get(name, {})
            alike = known.get("id") == content_id(there[name])
            return not alike or known.get("here") != _state(files[name])

        def get(name: str, parts: int) -> None:
            target = self._here / name if name else self._here
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_file(target) as unfinished, asking(self._url) as (fs, key):
                options = in_parts(self._url, there[name]["size"], parts, is_put=False)
                fs.get_file(f"{key}/{name}" if name else key, str(unfinished), **options)
            self.record[name] = {"id": content_id(there[name]), "here": _state(target)}

        wanted = {name: one["size"] for name, one in there.items() if is_old(name)}
        for name in filter(without, list(wanted)):
            remove(self._here / name)
            del wanted[name]
        self._each(get, wanted, "fetching")

    def upload(self, check: Callable[[], None]) -> None:
        """Bring the store up to date; `check` is called before each change of it."""
        files = self.files()

        def drop(name: str) -> None:
            check()
            try:
                with asking(self._url) as (fs, key):
                    fs.rm_file(f"{key}/{name}" if name else key)
            except StoreError as failure:
                if failure.errno != errno.ENOENT:
                    raise
            self.record.pop(name, None)

        def put(name: str, parts: int) -> None:
            check()
            before = _state(files[name])
            with asking(self._url) as (fs, key):
                target = f"{key}/{name}" if name else key
                options = in_parts(self._url, wanted[name], parts, is_put=True)
                fs.put_file(str(files[name]), target, **options)
                fs.invalidate_cache()
                self.record[name] = {"id": content_id(fs.info(target)), "here": before}

        def is_new(name: str) -> bool:
            return self.record.get(name, {}).get("here") != _state(files[name])

        gone = self.record.keys() - files.keys()
        changed = {name for name in files if is_new(name)} | gone
        # While a file of a folder changes, its manifest must not vouch for it.
        void = {
            name
            for name in self.record.keys() - gone
            if _stage(name) and any(_vouches(name, other) for other in changed)
        }
        for name in sorted(void | gone, key=_stage, reverse=True):
            drop(name)
        wanted = {name: files[name].stat().st_size for name in files if is_new(name)}
        self._each(put, wanted, "publishing")

    def _each(
        self, action: Callable[[str, int], None], sizes: Mapping[str, int], title: str
    ) -> None:
        """Copy files, several at a time, stage by stage; an action is told how many parts of one.

        A few large files have more parts at once, so that memory does not grow with their number.
        """
        about = {"desc": f"{title} {self._here.name}", "delay": 1, "leave": False}
        bar = tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, **about)
        with bar, ThreadPoolExecutor(_THREADS) as threads:
            for stage in range(3):
                names = [name for name in sizes if _stage(name) == stage]
                large = sum(sizes[name] > PART_BYTES for name in names)
                parts = repeat(_THREADS // min(large or 1, _THREADS))
                for name, _ in zip(names, threads.map(action, names, parts), strict=True):
                    bar.update(sizes[name])
                self._note()


def _stage(name: str) -> int:
    """When a file is copied: data, then what lists them, then what says that all is done."""
    last = name.rpartition("/")[2]
    return 2 if last in ("summary.json", "package.json") else int(last == "manifest.json")


def counts(name: str) -> bool:
    """Whether a file makes what was copied count: a file alone, or what says that all is done."""
    return not name or _stage(name) > 0


def _vouches(name: str, other: str) -> bool:
    """Whether a file says that another one is whole: both are in its folder."""
    folder, slash, _ = name.rpartition("/")
    return other != name and other.startswith(folder + slash)


def _is_unfinished(name: str, names: Collection[str]) -> bool:
    """Whether a file belongs to a checkpoint without a manifest, which does not count."""
    checkpoint = re.match(r"(.*/)?checkpoints/[^/]+/", name)
    return checkpoint is not None and f"{checkpoint[0]}manifest.json" not in names


def _is_folder(name: str, described: Mapping[str, Any]) -> bool:
    """Whether a key is no file: an empty one that ends in a slash, as consoles and Hadoop write."""
    return name.endswith("/") or described.get("type") == "directory"


def _is_hidden(name: str) -> bool:
    """Whether a part of a name begins with a dot, or leads elsewhere."""
    return "/." in f"/{name}" or "//" in name


def _state(path: Path) -> list[int] | None:
    """Changes when a local file is written; None if it is not there."""
    with suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None
