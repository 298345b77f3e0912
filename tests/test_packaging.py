"""Folders import each other as they should, and the wheel holds them all."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

FOLDERS = ("data", "engine", "models", "optim")


def _project_files():
    for folder, names, files in os.walk(ROOT):
        here = Path(folder)
        names[:] = [
            name
            for name in names
            if not name.startswith(".")
            and name not in ("build", "runs", "cache")
            and not (here / name / "pyvenv.cfg").exists()
        ]
        yield from (here / file for file in files if file.endswith(".py"))


def _imported_modules(source):
    """Names of all imported modules; no import is relative."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imports_under(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for module in _imported_modules(file.read_text()):
            yield file.relative_to(ROOT), module


@pytest.mark.slow
def test_folders_are_only_imported_as_parts_of_stampede():
    files = list(_project_files())
    assert ROOT / "launch.py" in files
    wrong = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in files
        for module in _imported_modules(file.read_text())
        if module.split(".")[0] in FOLDERS
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "folder, others",
    [
        ("data", ["files", "settings"]),
        ("models", ["native_library", "settings"]),
        ("optim", ["native_library"]),
    ],
)
def test_lower_folders_import_only_themselves(folder, others):
    own = f"stampede.{folder}"
    allowed = tuple(f"stampede.{name}." for name in (folder, *others))
    found = list(_imports_under(folder))
    wrong = [
        f"{file}: {module}"
        for file, module in found
        if module.split(".")[0] == "stampede" and not f"{module}.".startswith(allowed)
    ]
    assert any(module.startswith(own) for _, module in found)
    assert wrong == []


def test_the_gpu_script_finds_every_folder_on_a_machine_without_stampede():
    script = (ROOT / "benchmarks/gpu.sh").read_text()
    assert [folder for folder in FOLDERS if f'"$root"/{folder} ' not in script] == []


def test_wheel_holds_all_of_stampede_and_nothing_else(tmp_path):
    # Built from a copy, because setuptools leaves build/ and an egg-info beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("stampede", *FOLDERS, "tests", "configs", "install"):
        shutil.copytree(ROOT / name, source / name, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE", "launch.py"):
        shutil.copy(ROOT / name, source)

    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *options, "."],
        cwd=source,
        check=True,
    )

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        commands = archive.read("stampede-0.1.0.dist-info/entry_points.txt").decode()
    # What `pip install` makes `stampede train` and all others of.
    assert commands.split() == [
        "[console_scripts]",
        "stampede",
        "=",
        "stampede.engine.cli:stampede",
    ]
    assert {name.split("/")[0] for name in names} == {"stampede", "stampede-0.1.0.dist-info"}
    modules = {
        f"stampede/{file.relative_to(ROOT)}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".cpp", ".h", ".html")
    }
    modules |= {f"stampede/{file.name}" for file in (ROOT / "stampede").glob("*.py")}
    assert modules <= set(names)
