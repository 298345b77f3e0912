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


class Recorded:
    """A fixture, and the model of ours that it is about."""

    def __init__(self, path):
        self.arrays = {name: array for name, array in np.load(path).items()}
        self.settings = json.loads(str(self.arrays["settings"]))
        self.tables = torch.from_numpy(self.arrays["tables"])
        self.numbers = torch.from_numpy(self.arrays["numbers"])
        self.logits = torch.from_numpy(self.arrays["logits"])
        fields, rows, width = self.tables.shape
        name = self.settings["name"]
        self.model = CTRModel(
            name,
            {f"C{field}": rows for field in range(fields)},
            self.numbers.shape[1],
            width - 1,
            self.settings["hidden"],
            0,
            network(name).options.model_validate(self.settings["options"]),
        )
        weights = {
            name.removeprefix("w/"): torch.from_numpy(array)
            for name, array in self.arrays.items()
            if name.startswith("w/")
        }
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown and all(name.startswith("front.") for name in missing)

    def ours(self):
        """Our logits."""
        ids = torch.from_numpy(self.arrays["ids"]).long()
        rows = torch.zeros(*ids.shape, self.model.front.columns.stored)
        fields = torch.arange(ids.shape[1])
        rows[..., : self.tables.shape[2]] = self.tables[fields, ids]
        with torch.no_grad():
            return self.model.logits(rows.flatten(1), self.numbers)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_logits(path):
    recorded = Recorded(path)
    assert recorded.logits.std() > 0.1
    torch.testing.assert_close(recorded.ours(), recorded.logits, rtol=1e-5, atol=1e-5)


def test_all_networks_are_compared():
    names = {Recorded(path).settings["name"] for path in FIXTURES}
    assert names | GOLDEN == set(OURS)
