"""Tables read from the checkpoint of a whole run."""

import pytest
import torch

from stampede.engine.build import build
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.reading import open_dataset
from stampede.engine.resume import load
from stampede.engine.tables import read_field
from support.gathered import gather_field
from support.jobs import run_small, small_config
from support.warm_starts import tensors_of, weights_name


@pytest.mark.slow
def test_a_checkpoint_is_read_without_a_model(tmp_path):
    settings = ["model.first_order_scale=8"]
    run_small(tmp_path, settings)
    folder = tmp_path / "small/checkpoints/epoch_0001"
    config = small_config(tmp_path, *settings, "checkpoint.resume=auto")
    with processes("cpu") as here:
        dataset = open_dataset(config, here)
        job = build(config, dataset, here)
        load(folder, job, dataset)
        for field in ("C1", "C3"):
            gathered = gather_field(job.model, field, 10, here)
            for one, other in zip(read_field(folder, field), gathered, strict=True):
                assert torch.equal(one, other)
            stored = tensors_of(folder)[weights_name(field)][:, 10:11]
            assert stored.any() and torch.equal(gathered.first_order, 8 * stored)
    with pytest.raises(RunFolderError, match=r"'C99'.*C1, C2"):
        read_field(folder, "C99")
    with pytest.raises(RunFolderError, match="is not a checkpoint"):
        read_field(tmp_path, "C1")
