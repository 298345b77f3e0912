"""Saving while training continues: a checkpoint appears whole or not at all, on all ranks alike."""

import threading

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from stampede.engine.checkpoint import saving
from stampede.engine.checkpoint.resume import load
from stampede.engine.checkpoint.retention import newest_whole
from stampede.engine.checkpoint.saving import Checkpoints
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.training.progress import Progress
from support.checkpoints import WEIGHTS, small_job
from support.ranks import run_ranks
from support.waiting import HANG

pytestmark = pytest.mark.slow


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def at(step):
    """A progress within an epoch."""
    return Progress(step=step, reader={"epoch": 0, "samples": 8})


def full(*_, **__):
    raise OSError(28, "No space left on device")


def local_tensors(job):
    """The model's tensors in this process."""
    for _, value in sorted(job.model.state_dict().items()):
        if hasattr(value, "local_shards"):
            yield from (shard.tensor for shard in value.local_shards())
        else:
            yield value


def change_weights(job):
    """Add to all weights in place, as a step would."""
    for tensor in local_tensors(job):
        tensor += 1.0


def first_weights(job):
    """One number of each tensor."""
    return [float(tensor.flatten()[0]) for tensor in local_tensors(job) if tensor.numel()]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    go_on, write = threading.Event(), saving.write_tensors

    def write_later(*arguments):
        assert go_on.wait(HANG)
        return write(*arguments)

    monkeypatch.setattr(saving, "write_tensors", write_later)
    with small_job(tmp_path) as (here, job, config, data, target):
        before, progress = first_weights(job), at(7)
        with Checkpoints(target, job, config, data, here) as checkpoints:
            checkpoints.save(progress)
            # What comes after must not be in it.
            change_weights(job)
            progress.step = 8
            assert not (target / "step_00000007").exists()
            go_on.set()
        assert names(target) == ["step_00000007"]
        assert first_weights(job) != before
        assert load(newest_whole(target), job, data).step == 7
        assert first_weights(job) == before


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_save_without_memory_for_a_copy_copies_nothing_and_waits(
    tmp_path, monkeypatch, capsys, is_asked
):
    """As with `checkpoint.asynchronous=false`, and it is said."""
    places, write = {}, saving.write_tensors

    def noted(state, *arguments):
        table = state["model"][WEIGHTS].local_shards()[0].tensor
        places[table.data_ptr()] = table.untyped_storage().nbytes() == table.nbytes
        return write(state, *arguments)

    monkeypatch.setattr(saving, "write_tensors", noted)
    if not is_asked:
        monkeypatch.setattr(saving, "free_memory", lambda: 10_000)
    asynchronous = f"checkpoint.asynchronous={not is_asked}"
    with small_job(tmp_path, asynchronous) as (here, job, config, data, target):
        checkpoints = Checkpoints(target, job, config, data, here)
        before = first_weights(job)
        checkpoints.save(at(7))
        assert names(target) == ["step_00000007"]
        table = job.model.state_dict()[WEIGHTS].local_shards()[0].tensor
        # In place, and cut to size, or else torch copies it.
        assert places == {table.data_ptr(): True}
        change_weights(job)
        load(newest_whole(target), job, data)
        assert first_weights(job) == before
    said = "training waits while checkpoints are written: a copy of "
    assert (said in capsys.readouterr().out) == (not is_asked)


def test_a_failed_save_without_memory_for_a_copy_is_told_by_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saving, "free_memory", lambda: 10_000)
    with small_job(tmp_path) as (here, job, config, data, target):
        with Checkpoints(target, job, config, data, here) as checkpoints:
            with monkeypatch.context() as patched:
                patched.setattr(saving, "as_text", full)
                checkpoints.save(at(7))
            checkpoints.save(at(8))
        assert names(target) == ["step_00000008"]
    assert "training continues, and the current state is written now" in capsys.readouterr().out


def test_wait_raises_a_failure_once(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "as_text", full)
    with small_job(tmp_path) as (here, job, config, data, target):
        checkpoints = Checkpoints(target, job, config, data, here)
        checkpoints.save(at(8))
        with pytest.raises(
            TrainingStoppedError, match=r"step_00000008: .*No space left.*resume=auto"
        ):
            checkpoints.wait()
        checkpoints.wait()
        # Nor does it hide another failure; nothing half-written is left.
        checkpoints.save(at(9))
        with pytest.raises(ZeroDivisionError), checkpoints:
            raise ZeroDivisionError
        assert names(target) == []


def test_a_file_that_is_cut_meanwhile_is_not_vouched_for(tmp_path, monkeypatch):
    described = saving.file_entry

    def cut(path, folder):
        entry = described(path, folder)
        path.write_bytes(path.read_bytes()[:9])
        return entry

    monkeypatch.setattr(saving, "file_entry", cut)
    with small_job(tmp_path) as (here, job, config, data, target):
        checkpoints = Checkpoints(target, job, config, data, here)
        checkpoints.save(at(7))
        with pytest.raises(TrainingStoppedError, match=r"distcp: 9 bytes instead of [\d,]+\)"):
            checkpoints.wait()
        assert names(target) == []


def test_the_next_checkpoint_is_written_after_one_that_failed(tmp_path, monkeypatch, capsys):
    with small_job(tmp_path) as (here, job, config, data, target):
        with Checkpoints(target, job, config, data, here) as checkpoints:
            with monkeypatch.context() as patch:
                patch.setattr(saving, "as_text", full)
                checkpoints.save(at(7))
                # The disk is full for a while only.
                checkpoints._thread.join()
            checkpoints.save(at(8))
            assert names(target) == ["step_00000008"]
            said = capsys.readouterr().out
            assert "step_00000007: the checkpoint cannot be written" in said
            assert "No space left" in said
            monkeypatch.setattr(saving, "as_text", full)
            checkpoints.save(at(9))
            # Not twice: nobody knows for how long nothing was saved.
            with pytest.raises(TrainingStoppedError, match=r"step_00000010: .*No space left"):
                checkpoints.save(at(10))
        assert names(target) == ["step_00000008"]


def save_while_changing(folder, overrides, world_size):
    """Save and change the weights at once; what they were, are, and are as loaded again.

    Then random numbers that followed the save, and those that follow the load.
    """
    with small_job(folder, *overrides, world_size=world_size) as (here, job, config, data, target):
        weights = [first_weights(job)]
        torch.manual_seed(1000 + here.rank)
        with Checkpoints(target, job, config, data, here) as checkpoints:
            checkpoints.save(at(7))
            change_weights(job)
            random = torch.rand(3).tolist()
        weights.append(first_weights(job))
        progress = load(here.on_main(lambda: newest_whole(target)), job, data)
        random = random, torch.rand(3).tolist()
        fewest = min(data.vocabulary_sizes.values())
        return *weights, first_weights(job), progress.step, fewest, random


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (2, ["sharding.plan=column_wise"]),
        (2, ["sharding.plan=data_parallel"]),
        # Ranks without rows.
        (4, ["sharding.plan=row_wise", "data.scale=0.00001"]),
    ],
)
def test_all_shards_are_copied_before_training_goes_on(tmp_path, ranks, overrides):
    found = run_ranks(ranks, save_while_changing, tmp_path, overrides, ranks)
    for before, changed, loaded, step, fewest, (followed, follows) in found:
        assert changed != before
        assert loaded == before
        assert step == 7 and (fewest < ranks) == (ranks == 4)
        # Each rank goes on with its own random numbers.
        assert follows == followed
    assert found[0][-1] != found[1][-1]


def fail_on_rank_1(folder, where):
    """What every rank is told when rank 1 alone fails, and what is left in the folder."""

    def no_memory(*_, **__):
        raise RuntimeError("can't allocate memory")

    with small_job(folder, world_size=2) as (here, job, config, data, target):
        checkpoints = Checkpoints(target, job, config, data, here)
        checkpoints.save(Progress(epoch=1, step=7))
        checkpoints.wait()
        if here.rank == 1 and where == "write":
            FileSystemWriter.write_data = full
        elif here.rank == 1:
            saving.on_cpu = no_memory
        said = []
        for step in (8, 9):
            try:
                checkpoints.save(at(step))
                checkpoints.wait()
            except TrainingStoppedError as stop:
                said.append(str(stop))
        here.on_main(lambda: None)
        return said, names(target)


@pytest.mark.parametrize("where", ["write", "copy"])
def test_all_ranks_fail_if_one_does(tmp_path, where):
    (said, left), (elsewhere, _) = run_ranks(2, fail_on_rank_1, tmp_path, where)
    assert left == ["epoch_0001"]
    assert len(said) == len(elsewhere) == 2
    for sentence in said + elsewhere:
        no_memory = "no memory for a copy; checkpoint.asynchronous=false needs none on a CPU: can't"
        assert (no_memory if where == "copy" else "No space left") in sentence
