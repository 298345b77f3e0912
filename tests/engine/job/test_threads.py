"""The threads of a training step: one where several would only wait for each other."""

import pytest
import torch

from stampede.engine.job.threads import using_threads
from support.checkpoints import small_job

WIDE = "model.hidden=[400,400,400]"
NO_CLIP = "optim.embedding.clip=null"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["train.batch_size=64"], 1),
        ([WIDE, "train.batch_size=64"], 1),
        ([WIDE, "train.batch_size=128"], 2),
        # Few products, many rows.
        (["model.name=lr", "train.batch_size=64"], 1),
        (["model.name=lr", "train.batch_size=16384"], 2),
        # Attention multiplies the same weights for every field.
        (["model.name=autoint", "train.batch_size=256"], 2),
    ],
)
def test_the_work_of_a_step_decides(tmp_path, overrides, expected):
    with using_threads(2), small_job(tmp_path, NO_CLIP, *overrides) as (_, job, *_):
        assert job.threads == expected
        assert job.ctr_model.training


@pytest.mark.wide
def test_rows_that_all_take_every_step_are_work(tmp_path):
    """Rows outside of a batch are clipped too, so they cannot wait."""
    large = ["data.scale=0.05", "optim.embedding.l2=1e-3", "train.batch_size=64"]
    clip = "optim.embedding.clip={granularity: row, threshold: 1.0}"
    found = []
    for number, more in enumerate((clip, NO_CLIP)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with using_threads(2), small_job(folder, *large, more) as (_, job, *_):
            found.append(job.threads)
    assert found == [2, 1]


def test_a_user_who_allows_one_thread_gets_one(tmp_path):
    with using_threads(1), small_job(tmp_path, WIDE, "train.batch_size=1024") as (_, job, *_):
        assert job.threads == 1


def test_other_work_has_all_threads_again():
    with using_threads(2):
        with using_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
