"""What the README shows works."""

import re

import pytest

from stampede.engine.config import load_config
from stampede.engine.datasets import open_dataset
from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=range(len(PYTHON_BLOCKS)))
def test_python_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_there_is_an_example_for_torchrec_and_one_for_plain_pytorch():
    assert len(PYTHON_BLOCKS) == 2
    assert "cowclip_sharders" in PYTHON_BLOCKS[0]
    assert "sparse=True" in PYTHON_BLOCKS[1]


def test_the_shape_it_shows_is_that_of_the_quickstart():
    shown = re.search(r"\"C1\"\)\.embedding\.shape\ntorch.Size\(\[(\d+), (\d+)\]\)", README)
    config = load_config(ROOT / "configs/quickstart.yaml")
    rows = open_dataset(config, None).vocabulary_sizes["C1"]
    assert [int(number) for number in shown.groups()] == [rows, config.model.dim]


def test_files_it_names_exist():
    named = re.findall(r"(?:\]\(|`)([\w./-]+\.(?:yaml|png|json|py|md))[`)]", README)
    assert named
    for name in named:
        if not name.startswith(("runs/", "cache/")) and "/" in name:
            assert (ROOT / name).exists(), name


def test_commands_it_shows_are_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", README, flags=re.M))
    assert {"train", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
