"""Networks against implementations that no one here wrote; see fixtures/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stampede.models import CTRModel, network
from support.networks import OURS

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.npz"))
# Followed by the authors' own code in test_golden_networks.
GOLDEN = {"deepfm", "wide_deep", "dcn"}
# Compared in test_histories, and with FuxiCTR's by benchmarks/peers/fuxictr_histories.py.
OF_HISTORIES = {"din"}


def recorded(path):
    """Arrays of a fixture, and its settings."""
    arrays = dict(np.load(path))
    settings = json.loads(str(arrays.pop("settings")))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, settings


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_logits(path):
    arrays, settings = recorded(path)
    ids, tables, numbers = arrays["ids"].long(), arrays["tables"], arrays["numbers"]
    fields, rows, width = tables.shape
    sizes, options = {f"C{field}": rows for field in range(fields)}, settings["options"]
    checked = network(settings["name"]).options.model_validate(options)
    hidden = settings["hidden"]
    model = CTRModel(
        settings["name"], sizes, numbers.shape[1], width - 1, hidden, 0, checked,
        goals=settings.get("goals", []),
    )  # fmt: skip
    weights = {key.removeprefix("w/"): w for key, w in arrays.items() if key.startswith("w/")}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and all(name.startswith("front.") for name in missing)
    stored = torch.zeros(*ids.shape, model.front.columns.stored)
    stored[..., :width] = tables[torch.arange(fields), ids]
    assert arrays["logits"].std() > 0.1
    with torch.no_grad():
        found = model.logits(stored.flatten(1), numbers)
    torch.testing.assert_close(found, arrays["logits"], rtol=1e-5, atol=1e-5)


def test_all_networks_are_compared():
    names = {recorded(path)[1]["name"] for path in FIXTURES}
    assert names | GOLDEN | OF_HISTORIES == set(OURS)
