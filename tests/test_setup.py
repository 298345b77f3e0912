"""What `make setup` does, and what folders import."""

import ast
import importlib.util
import shutil

import pytest

from support.paths import ROOT


def _load():
    spec = importlib.util.spec_from_file_location("install", ROOT / "install/install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = _load()


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 9, 1), (3, 14, 0)])
def test_unfit_python_gets_one_sentence(tmp_path, monkeypatch, capsys, version):
    monkeypatch.setattr(install.sys, "version_info", version)
    assert install.main(tmp_path) == 1
    assert "Python 3.10 to 3.13 is needed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Stands for .venv/bin/python: notes its calls in the file `calls`; `pip install -e` fails while a
# file `broken` exists.
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "{root}/calls"
case "$*" in
    -c*) echo '{{"python": "{version}", "pip": "26.0", "torch": {torch},
               "fbgemm-gpu": null, "fbgemm-gpu-cpu": null, "shim": false}}' ;;
    *--dry-run*) echo '{{"install": [{{"metadata": {{"name": "torch",
               "version": "2.13.0+cpu"}}}}]}}' ;;
    *" -e "*) [ ! -e "{root}/broken" ] || {{ echo "{error}" >&2; exit 1; }} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose .venv exists with a fake Python inside, on a machine without a GPU."""
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "install", tmp_path / "install")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    _fake_python(tmp_path)
    return tmp_path


def _fake_python(checkout, error="", torch="null"):
    python = checkout / ".venv" / "bin" / "python"
    facts = {"root": checkout, "error": error, "torch": torch, "version": install.VERSION}
    python.write_text(FAKE_PYTHON.format(**facts))
    python.chmod(0o755)


def _calls(checkout):
    calls = checkout / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [line for line in lines if line.startswith("-m pip")]


def test_set_up_prints_the_build_and_installs_what_has_changed(checkout, capsys):
    assert install.main(checkout) == 0
    assert "setup: torch 2.13.0+cpu\n" in capsys.readouterr().out
    assert "-m pip install -r install/requirements-cpu.txt -e .[test]" in _calls(checkout)
    assert install.main(checkout) == 0
    assert _calls(checkout) == []
    for file in ("pyproject.toml", "install/requirements-cpu.txt"):
        with (checkout / file).open("a") as text:
            text.write("# changed\n")
        assert install.main(checkout) == 0
        assert _calls(checkout) != []


@pytest.mark.parametrize(
    "error, said",
    [
        ("ERROR: Could not build it",
         "error: pip failed: Could not build it; read its output above and run make again"),
        ("WARNING: Retrying (Retry(total=0)\nERROR: No matching numpy",
         "error: pip could not reach its package index: check the network"),
    ],
)  # fmt: skip
def test_a_failed_install_is_said_in_one_sentence_and_done_again(checkout, capsys, error, said):
    install.main(checkout)
    _fake_python(checkout, error)
    (checkout / "broken").touch()
    (checkout / "pyproject.toml").write_text("# changed\n")
    assert install.main(checkout) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert not (checkout / ".venv" / install.STAMP).exists()
    (checkout / "broken").unlink()
    assert install.main(checkout) == 0
    assert (checkout / ".venv" / install.STAMP).exists()


def test_installed_torch_is_not_asked_for_again(checkout):
    _fake_python(checkout, torch='"2.13.0+cpu"')
    assert install.main(checkout) == 0
    assert not any("--dry-run" in call for call in _calls(checkout))


def test_folder_that_is_no_environment_is_left_alone(checkout, capsys):
    (checkout / ".venv" / "pyvenv.cfg").unlink()
    assert install.main(checkout) == 1
    assert "is not a virtual environment" in capsys.readouterr().err
    assert (checkout / ".venv" / "bin" / "python").exists()


def test_cuda_build_without_gpu_is_pointed_out(checkout, capsys):
    python = checkout / ".venv/bin/python"
    python.write_text(python.read_text().replace('"2.13.0+cpu"', '"2.13.0"'))
    assert install.main(checkout) == 0
    said = capsys.readouterr().out
    assert "setup: torch 2.13.0\n" in said
    assert "no NVIDIA GPU" in said and "PIP_EXTRA_INDEX_URL" in said


CPU = {"torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0", "shim": True}
CUDA = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": None, "shim": False}
EMPTY = {"torch": None, "fbgemm-gpu": None, "fbgemm-gpu-cpu": None, "shim": False}


@pytest.mark.parametrize(
    ("found", "variant", "torch", "unfit"),
    [
        (EMPTY, "cpu", "2.13.0+cpu", []),
        (CPU, "cpu", "2.13.0+cpu", []),
        (CUDA, "cuda", "2.13.0", []),
        (CPU, "cuda", "2.13.0", ["fbgemm-gpu", "fbgemm-gpu-cpu", "torch"]),
        (CUDA, "cpu", "2.13.0", ["fbgemm-gpu"]),
        # What a plain `pip install torchrec fbgemm-gpu-cpu` leaves: both, one over the other.
        (CPU | {"shim": False}, "cpu", "2.13.0+cpu", ["fbgemm-gpu", "fbgemm-gpu-cpu"]),
    ],
)
def test_the_two_fbgemm_packages_never_meet(found, variant, torch, unfit):
    assert install.unfit_packages(found, variant, torch) == unfit


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


@pytest.mark.slow
def test_folders_are_imported_as_parts_of_stampede_and_lower_ones_import_only_themselves():
    allowed = {
        "data": ("data", "files", "settings", "stores"),
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
