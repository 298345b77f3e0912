"""The wheel: plain folders that train where only they are installed."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.slow


# Everything but the laboratory is there, and needs nothing of it.
PROGRAM = """
import importlib, pkgutil, sys
import stampede, stampede.engine.run, stampede.engine.inference.prediction

# Imported where they draw and make frames.
assert "torch" in sys.modules and not {"matplotlib", "pandas", "tensorboard"} & set(sys.modules)
sys.modules["stampede.lab"] = None

for module in pkgutil.walk_packages(stampede.__path__, "stampede."):
    if not {"package", "triton", "__main__"} & set(module.name.split(".")):
        importlib.import_module(module.name)

data = {"rows": 2000, "test_rows": 500, "scale": 1e-4}
run = stampede.train(
    data=data, model={"hidden": [8]}, train={"batch_size": 500, "epochs": 1}, run={"dir": "runs"}
)
print(stampede.__file__, run.metrics["test"]["auc"])
"""


def test_an_installed_wheel_trains(tmp_path):
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    for folder in ("stampede", "data", "engine", "models", "optim"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    kinds = (".py", ".cpp", ".h", ".html", ".typed")
    files = [file.relative_to(source) for file in source.rglob("*") if file.suffix in kinds]
    ours = {str(file).removeprefix("stampede/") for file in files}
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    # `make setup` has built it with what the build requires, and nothing else.
    build = ["wheel", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(source)]
    subprocess.run([*pip, *build], check=True)
    [wheel] = wheels.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not any(name.startswith("stampede/lab/") for name in names)
    assert len(ours) > 150 and {f"stampede/{file}" for file in ours} <= set(names)
    assert {name.split("/")[0] for name in names} == {"stampede", "stampede-0.1.0.dist-info"}
    install = ["install", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, auc = done.stdout.split()[-2:]
    assert where.startswith(str(site)) and 0 < float(auc) < 1
