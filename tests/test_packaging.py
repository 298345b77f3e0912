"""Folders import each other as they should, and the wheel holds them all."""

import ast
import shutil
import subprocess
import sys
import zipfile

from support.paths import ROOT

FOLDERS = ("data", "engine", "models", "optim")


def _imports():
    """Of all Python files: the file, and the name of an imported module; none is relative."""
    files = [ROOT / "launch.py"]
    for folder in (*FOLDERS, "benchmarks", "examples", "stampede", "tests"):
        files += (ROOT / folder).rglob("*.py")
    for path in files:
        file = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield file, node.module
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def test_folders_are_imported_as_parts_of_stampede_and_lower_ones_import_only_themselves():
    allowed = {
        "data": ("data", "files", "settings"),
        "models": ("models", "native_library", "settings"),
        "optim": ("optim", "native_library"),
    }
    found = list(_imports())
    assert ("launch.py", "stampede.engine.cli") in found
    for file, module in found:
        first, *rest = module.split(".")
        assert first not in FOLDERS, f"{file}: {module}"
        folder = file.split("/")[0]
        if first == "stampede" and rest and folder in allowed:
            assert rest[0] in allowed[folder], f"{file}: {module}"


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
