"""The paper's networks are the authors' own, in what they compute and in how they train."""

import pytest
import torch

from stampede.engine.job.build import build
from stampede.engine.processes import processes
from support.golden import (
    TOLERANCE,
    Golden,
    golden_file,
    jagged,
    load,
    train_with_the_engine,
)

FILES = ("wd", "dcn", "dcnv2", "deepfm", "deepfm_bound")


@pytest.mark.parametrize("name", FILES)
def test_final_weights_give_the_authors_probabilities(name):
    golden = Golden(golden_file(name))
    last = golden.meta["steps"]
    with processes("cpu") as here:
        job = build(golden.config([]), golden.dataset(), here)
        load(job, golden, last)
        ids, numbers, _ = golden.batch(last)
        with torch.no_grad():
            ours = torch.sigmoid(job.model(jagged(ids, list(golden.vocabulary)), numbers))
    theirs = torch.from_numpy(golden.arrays["logits_final"]).view(-1)
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# DeepFM's are followed in tests/optim and tests/distributed, on every plan.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wd", "dcn", "dcnv2"])
def test_training_follows_the_authors(name):
    path = golden_file(name)
    assert train_with_the_engine(path).worst < TOLERANCE
