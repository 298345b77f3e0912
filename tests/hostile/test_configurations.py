"""Configuration files and overrides from people who mean harm."""

import json

import pytest
import yaml
from hypothesis import strategies as st

from stampede.engine.config import all_keys, config_type, load_config, to_yaml
from stampede.settings import SettingsError
from support.fuzzing import TEXTS, VALUES, changed_trees, fuzz
from support.guarded import guarded
from support.paths import ROOT
from support.yaml_texts import FRAGMENTS, written, yaml_files

BASES = [
    yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))
] + [
    {"data": {"kind": "table", "path": ["a", "b"], "schema_file": "s.yaml", "split": "files",
              "test_path": "c", "cache": "x", "memory_gb": 2.0, "shuffle": "block"}},
    {"data": {"kind": "sizes", "tables": {"a": 10}, "ids_per_sample": {"a": 2.0}, "numbers": 3},
     "model": {"name": "dcnv2", "options": {"layers": 2, "cross": "full"}, "hidden": [8]}},
    {"optim": {"embedding": {"optimizer": "helen", "lr": 1e-3, "schedule": {"decay": "cosine"}},
               "dense": {"betas": [0.9, 0.99], "schedule": {"warmup": 0.5}, "plateau": {}}},
     "train": {"epochs": 3, "batch_size": 64}, "evaluate": {"metrics": ["pr_auc"]}},
]  # fmt: skip

KEYS = sorted({part for key in all_keys(config_type()) for part in key.path.split(".")})
TREES = changed_trees(BASES, VALUES | st.sampled_from(FRAGMENTS), [*KEYS, *FRAGMENTS])

CASES = [200, pytest.param(10_000, marks=pytest.mark.soak)]


@pytest.fixture
def folder(tmp_path):
    """Beside the configuration lies a file that nobody asked to execute."""
    executed = tmp_path / "executed"
    (tmp_path / "canary").write_text(f"open({str(executed)!r}, 'w').close()")
    return tmp_path


def said_of(folder, overrides=()):
    """What is said of a configuration; one that is accepted can be written and read again."""
    path = folder / "job.yaml"
    with guarded(folder, SettingsError) as said:
        config = load_config(path, overrides, world_size=2)
        (folder / "written.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert load_config(folder / "written.yaml") == config
    assert not (folder / "executed").exists()
    return said[0] if said else None


@pytest.mark.parametrize("cases", CASES)
def test_configuration_files(folder, cases, request):
    def check(content):
        (folder / "job.yaml").write_bytes(content)
        return said_of(folder)

    seen = fuzz(yaml_files(TREES).filter(lambda content: b"import" not in content), check, cases)
    assert seen["accepted"] > cases / 50 and len(seen) > 15, seen


@st.composite
def overrides(draw):
    known = {key.path: key.default for key in all_keys(config_type())}
    paths = list(known)
    hostile = st.one_of(
        st.lists(st.sampled_from(KEYS + TEXTS), min_size=1, max_size=4).map(".".join),
        st.sampled_from(
            ["a." * 2000 + "b", "train.epochs.a.a", ".", "..", "", "train.", "=", "=="]
        ),
        st.text(max_size=30),
    )
    texts = st.one_of(
        (VALUES | st.sampled_from(FRAGMENTS)).map(_written), st.sampled_from(TEXTS), st.text()
    )
    given = []
    for _ in range(draw(st.integers(1, 2))):
        key = draw(st.sampled_from(paths) if draw(st.integers(0, 5)) else hostile)
        equals = "=" if draw(st.integers(0, 9)) else draw(st.sampled_from(["", " = ", ":"]))
        # The default is often accepted, and then the next override is looked at.
        default = known.get(key)
        valid = isinstance(default, int | float | str | None) and draw(st.booleans())
        given.append(f"{key}{equals}{json.dumps(default) if valid else draw(texts)}")
    return given


def _written(value):
    try:
        return written(value)
    except RecursionError:
        return json.dumps(str(value)[:100])


@pytest.mark.parametrize("cases", CASES)
def test_overrides(folder, cases):
    (folder / "job.yaml").write_text("train: {epochs: 2}\n")
    seen = fuzz(
        overrides().filter(lambda given: not any("import" in text for text in given)),
        lambda given: said_of(folder, given),
        cases,
    )
    assert seen["accepted"] > cases / 50 and len(seen) > 15, seen
