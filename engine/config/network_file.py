"""A user's own networks: the file named by `model.import`."""

from __future__ import annotations

import hashlib
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stampede.models import network, network_names
from stampede.settings import SettingsError

# Names of the modules that files were executed as, by path and by content.
_MODULES: dict[str, str] = {}

# What was executed last of each file, by path.
_SOURCES: dict[str, bytes] = {}


def execute_network_file(model: Any, config_path: Path) -> None:
    """Execute the file that the section `model` names under `import`, if any.

    The name is replaced by the absolute path, so that the written configuration finds it again.

    Args:
        model: the section as it was read, unchecked.
        config_path: file that it was read from.

    Raises:
        SettingsError: there is no such file, it fails, or it does not have the network asked for.
    """
    given = model.get("import") if isinstance(model, dict) else None
    # What is no text is refused where all keys are checked.
    if not given or not isinstance(given, str):
        return
    path = _find(given, config_path)
    model["import"] = str(path)
    before = _registered()
    _execute(path)
    new = [name for name, found in _registered().items() if before.get(name) != found]
    asked = model.get("name")
    if asked is None:
        raise SettingsError(
            f"model.import: {path} is given without model.name; write model.name: "
            f"{' or '.join(new) or 'NAME'}"
        )
    if not new and asked not in network_names():
        raise SettingsError(
            f"model.import: {path} registers no network; write @register({str(asked)!r}), from "
            "stampede.models, before the class of the network"
        )


def executed_source(path: str) -> bytes:
    """The content of a file as it was when it was executed, whatever became of it since.

    Args:
        path: the value of `model.import` in a configuration that was loaded.
    """
    return _SOURCES[path]


def _find(given: str, config_path: Path) -> Path:
    """The file, seen from the working folder or else from the configuration."""
    places = [Path(given), config_path.parent / given]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise SettingsError(
        f"model.import: found {given!r}, and there is no file {looked}; write the path of a Python "
        "file, relative to the working folder or to the configuration"
    )


def _registered() -> Mapping[str, Any]:
    return {name: network(name) for name in network_names()}


def _execute(path: Path) -> None:
    source = _SOURCES[str(path)] = path.read_bytes()
    # Not among the modules that can be imported: its name must not hide one of them. A changed
    # file, or the same in another place, is the same module and may register the same networks.
    keys = (str(path), hashlib.sha256(source).hexdigest())
    known = [_MODULES[key] for key in keys if key in _MODULES]
    name = known[0] if known else f"model.import:{path}"
    _MODULES.update(dict.fromkeys(keys, name))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickle look their module up here.
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as failure:
        raise SettingsError(
            f"model.import: {path}{_line(failure, path)}: {type(failure).__name__}: {failure}"
        ) from failure
    finally:
        sys.path.remove(str(path.parent))


def _line(failure: BaseException, path: Path) -> str:
    """Where in the file it failed."""
    if isinstance(failure, SyntaxError):
        return f", line {failure.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(failure.__traceback__)
        if frame.filename == str(path)
    ]
    return f", line {lines[-1]}" if lines else ""
