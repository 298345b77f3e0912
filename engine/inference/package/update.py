"""Keeps a served package up to date with deltas of `stampede export --since`.

    from update import apply, load_current, publish      # with a package's folder on sys.path

    apply("models/day_6", ["deltas/day_7"], "models/day_7")
    publish("models", "day_7")                           # models/current.json names it
    model = load_current("models")                       # the model to score with now

or `python update.py models/day_6 deltas/day_7 --out models/day_7 --publish`.

A package is never changed: `apply` makes a new one with the content of a full export. A loaded
model does not change either, so a server never mixes two versions. Programs are never taken from a
delta: the new package keeps the Python files of the old one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent

DELTA, PACKAGE, CURRENT = "delta.json", "package.json", "current.json"
FORMAT = 3

# Files that a delta may replace; all others come from the package.
_DATA = re.compile(
    r"(dense\.json|(dense|tables/[\w.-]+)\.safetensors|vocabularies/[\w.-]+\.parquet)"
)

_CHANGES = re.compile(r"changes/[\w-][\w.-]*")

# The `load.py` beside this file, whatever sys.path says.
_spec = importlib.util.spec_from_file_location(f"{__name__}_load", HERE / "load.py")
load = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(load)

# Not that a file cannot be written.
_DAMAGE = (FileNotFoundError, *(one for one in load.DAMAGE if one is not OSError))


def apply(package: str | Path, deltas: Sequence[str | Path], out: str | Path) -> str | Path:
    """Make a new package from a package and the deltas that follow it, in order.

    Args:
        package: a full export, or the result of an earlier call; or its URL, see `load`.
        deltas: each based on the package before it; or their URLs.
        out: a new folder; it appears once it is complete. Or its URL; without `package.json`, the
            last file that is copied there, a folder is no package.

    Returns:
        The new package; its URL, if that was given.

    Raises:
        ValueError: a delta has another base, a file is damaged, or the store cannot be used.
        OSError: a file cannot be written.
    """
    url, out = str(out), Path(str(out).removeprefix("file://"))
    if "://" in url and not url.startswith("file://"):
        with load.store_of(url, "written") as (store, key):
            store.invalidate_cache()
            is_there = bool(store.find(key))
        if is_there:
            raise ValueError(f"{url}: already exists; write another folder, or delete it first")
        with tempfile.TemporaryDirectory() as folder:
            _send(Path(apply(package, deltas, Path(folder) / "package")), url)
        return url
    if out.exists():
        raise ValueError(f"{out}: already exists; write another folder")
    if not deltas:
        raise ValueError("no delta given")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)

    fetched: dict[Path, str] = {}

    def here(path: str | Path, name: str) -> Path:
        if "://" not in str(path):
            return Path(path)
        load.fetch(str(path), str(temporary / name))
        fetched[temporary / name] = str(path)
        return temporary / name

    try:
        package = here(package, "package")
        for number, delta in enumerate(deltas):
            patch(package, here(delta, f"delta_{number}"), temporary / str(number))
            package = temporary / str(number)
        os.replace(package, out)
    except ValueError as failure:
        reason = str(failure)
        for copy, url in fetched.items():
            reason = reason.replace(str(copy), url)
        raise ValueError(reason) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _send(package: Path, url: str) -> None:
    """Copy a package to an object store."""
    names = [p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()]
    names.sort(key=lambda name: (name == PACKAGE, name))
    with load.store_of(url, "written") as (store, key):
        for name in names:
            store.put_file(str(package / name), f"{key}/{name}")


def patch(package: Path, delta: Path, out: Path, checked: bool = True) -> None:
    """Apply one delta to a package; if `checked`, the result must match its description."""
    try:
        about = load.parsed(load.read_file(delta / DELTA))
        found, base = about["format"], about["base"]
        tables, vocabularies = dict(about["tables"]), dict(about["vocabularies"])
        changes = [*tables.values(), *vocabularies.values()]
    except load.DAMAGE as failure:
        raise ValueError(f"{delta}: no delta here ({failure})") from None
    if found != FORMAT:
        raise ValueError(f"{delta}: has format {found!r}, but this update.py reads {FORMAT}")
    wrong = [name for name in (*tables, *vocabularies) if not _DATA.fullmatch(name)]
    wrong += [name for name in changes if not _CHANGES.fullmatch(str(name))]
    if wrong:
        raise ValueError(f"{delta}: {wrong[0]!r} is not a file name of a package")
    if links := [path for path in delta.rglob("*") if path.is_symlink()]:
        raise ValueError(f"{links[0]}: is a link, which may lead out of the delta; copy its file")
    after = load.read_about(delta)
    expected = _contents(after)
    if base != package_digest(package):
        raise ValueError(
            f"{delta}: was made for another package than {package} (SHA-256 of its content "
            "differs); apply the deltas in order, each to the result of the previous one"
        )
    out.mkdir(parents=True)
    for name in after["files"]:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        try:
            if name in tables:
                table, changes = load_file(package / name), load_file(delta / tables[name])
                save_file(patched(table, changes), target)
            elif name in vocabularies:
                old, changes = (
                    pl.read_parquet(path, glob=False)
                    for path in (package / name, delta / vocabularies[name])
                )
                new = patched_vocabulary(old["value"], changes, about["sizes"][name])
                new.to_frame().write_parquet(target)
            elif _DATA.fullmatch(name) and (delta / name).is_file():
                shutil.copyfile(delta / name, target)
            else:
                _link(package / name, target)
        except _DAMAGE as failure:
            raise ValueError(f"{delta}: {name} cannot be made ({failure})") from None
    text = sealed(after, out)
    found = _contents(json.loads(text))
    differing = [name for name in expected if found.get(name) != expected[name]]
    if checked and differing:
        raise ValueError(
            f"{delta}: {differing[0]} differs from the export after the update; copy the delta "
            "again, or export a full package once"
        )
    (out / PACKAGE).write_text(text, encoding="utf-8")


def _contents(about: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the content of each file of a package."""
    return {name: entry.get("content", entry["sha256"]) for name, entry in about["files"].items()}


def package_digest(package: Path) -> str:
    """SHA-256 of a package's content, independent of the library versions that wrote its files."""
    about = load.read_about(package)
    text = json.dumps({**about, "files": _contents(about), "sha256": ""}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(about: Mapping[str, Any], folder: Path) -> str:
    """The text of `package.json`: a package's description, its files, and the text's SHA-256.

    Tables and vocabularies also have a SHA-256 of their content, as other versions of safetensors
    and polars may write the same content as different bytes.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == PACKAGE:
            continue
        entry = {"bytes": path.stat().st_size, "sha256": load.file_sha256(path)}
        if name.startswith(("tables/", "vocabularies/")):
            entry["content"] = content_digest(path)
        files[name] = entry
    text = json.dumps({**about, "files": files, "sha256": ""}, indent=1, allow_nan=False) + "\n"
    # The text's own SHA-256 is computed without it.
    before, key, after = text.rpartition('"sha256": "')
    return before + key + hashlib.sha256(text.encode()).hexdigest() + after


def content_digest(path: Path) -> str:
    """SHA-256 of the tensors or ids that a file holds."""
    digest = hashlib.sha256()
    if path.suffix == ".parquet":
        values = pl.read_parquet(path, glob=False)["value"]
        digest.update(values.str.len_bytes().fill_null(-1).cast(pl.Int64).to_numpy().tobytes())
        digest.update(values.str.join("").item().encode())
    else:
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def patched(table: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A table's tensors with some rows replaced or added.

    Args:
        changes: `rows` `[n]` int64, their new values `[n, ...]` by tensor, and the new `size`.
    """
    found = {}
    for name, values in table.items():
        whole = torch.zeros(int(changes["size"]), *values.shape[1:], dtype=values.dtype)
        kept = min(len(whole), len(values))
        whole[:kept] = values[:kept]
        whole[changes["rows"]] = changes[name]
        found[name] = whole
    return found


def patched_vocabulary(values: pl.Series, changed: pl.DataFrame, size: int) -> pl.Series:
    """A vocabulary of `size` lines, some of them `changed` (`line` and `value`)."""
    more = pl.Series("value", [None] * max(0, size - len(values)), pl.String)
    return pl.concat([values.head(size), more]).scatter(changed["line"], changed["value"])


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def publish(folder: str | Path, package: str) -> None:
    """Name the package of a folder that servers load from now on; `current.json` is replaced.

    The folder may be a URL.
    """
    text = json.dumps({"package": package}) + "\n"
    if "://" in str(folder):
        with load.store_of(f"{str(folder).rstrip('/')}/{CURRENT}", "written") as (store, key):
            store.pipe_file(key, text.encode())
        return
    file = Path(folder) / CURRENT
    unfinished = file.with_name(f".{CURRENT}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


def load_current(folder: str | Path, device: str = "cpu") -> Any:
    """The model of the package that `publish` named; see `load`.

    Args:
        folder: its path, or its URL.

    Raises:
        ValueError: it named none, or the package is damaged.
    """
    file = f"{str(folder).rstrip('/')}/{CURRENT}"
    try:
        if "://" in file:
            with load.store_of(file, "read") as (store, key):
                store.invalidate_cache()
                content = store.cat_file(key)
            package = file.removesuffix(CURRENT) + load.parsed(content)["package"]
        else:
            package = Path(folder) / load.parsed(load.read_file(Path(file)))["package"]
    except load.DAMAGE as failure:
        raise ValueError(f"{file}: names no package ({failure})") from None
    return load.load(package, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Apply deltas on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Apply deltas of `stampede export --since`.")
    parser.add_argument(
        "package", help="a full export, or the result of an earlier call; also a URL"
    )
    parser.add_argument("deltas", nargs="+", metavar="delta", help="based on the previous one")
    parser.add_argument("--out", required=True, help="new folder, or its URL")
    parser.add_argument(
        "--publish", action="store_true", help=f"name the result in {CURRENT} of its parent folder"
    )
    given = parser.parse_args(arguments)
    try:
        made = apply(given.package, given.deltas, given.out)
        if given.publish:
            folder, _, name = os.path.normpath(made).rpartition("/")
            if "://" in str(made):
                folder, _, name = str(made).rstrip("/").rpartition("/")
            publish(folder or ".", name)
            print(f"{folder or '.'}/{CURRENT} names {name}", file=sys.stderr)
    except (OSError, ValueError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
