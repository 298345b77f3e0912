"""Every benchmark at a size of seconds: what it measures takes place, and adds up."""

import json
from contextlib import ExitStack

import pytest
import torch

from support.paths import ROOT
from support.ranks import run_ranks

FLOORS = {
    "copy_bytes_per_second": 2e10,
    "gemm_flops": {"fp32": 2e11, "bf16": 4e11},
    "mlp_samples_per_second": {
        "fp32": {"1024": 60e3, "2048": 70e3},
        "bf16": {"1024": 120e3, "2048": 140e3},
    },
}

OVERRIDES = ["train.batch_size=256", "model.hidden=[16,16]"]


def test_the_parts_of_a_step_are_the_whole_step(clicks, tmp_path):
    import steps

    overrides = [f"data.path={clicks}", *OVERRIDES]
    parts = steps.parts_of_a_step(overrides, batch=256, steps=10)
    assert sum(parts[name] for name in steps.PARTS) == pytest.approx(parts["step"])
    assert all(parts[name] > 0 for name in steps.PARTS)
    steps.draw_parts({"256 fp32": parts}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_all_parts_of_a_step_are_watched(clicks):
    from steps import watch_parts
    from timing import Stopwatch
    from training import training

    watch = Stopwatch()
    with training([f"data.path={clicks}", *OVERRIDES]) as job, ExitStack() as stack:
        watch_parts(watch, stack, job)
        job.seconds(3)
    # Reading and sending are a batch ahead of lookups; logits, their backward and Adam; the tables'
    # backward and one flush.
    assert watch.calls == {"data": 4, "lookup": 4 + 3, "dense": 3 * 3, "update": 3 + 1}


def test_growth_knows_the_memory_of_the_tables(clicks, monkeypatch):
    import steps
    from training import Training

    taken, seconds = [], Training.seconds

    def noted(job, count):
        taken.append(count)
        return seconds(job, count)

    monkeypatch.setattr(Training, "seconds", noted)
    # It would set the allocator of this process, which goes on with other tests.
    monkeypatch.setattr(steps, "keep_freed_memory", lambda: None)
    found = steps.time_and_memory(clicks, 256, 2, trained=3)
    assert taken == [2 + 3, 2] and found["steps"] == 2
    # Weights and two moments of 12 columns.
    assert found["table_bytes"] == 144 * found["ids"]
    assert found["peak_bytes"] > found["table_bytes"]
    more = {**found, "ids": found["ids"] + 1000, "peak_bytes": found["peak_bytes"] + 150_000}
    assert steps.bytes_per_id({"20": more, "1": found}) == 150


def test_ranks_wait_for_each_other_and_repeat_their_exchanges(clicks):
    from communication import summarize, train_and_wait

    overrides = [f"data.path={clicks}", *OVERRIDES]
    overrides += ["evaluate.batch_size=256", "sharding.plan=table_wise"]
    ranks = run_ranks(2, train_and_wait, overrides, 3)
    for rank in ranks:
        assert 0 < rank["waited"] < rank["seconds"]
        assert rank["alone"] > 0 and rank["processor_seconds"] > 0
        # The dense layers' gradients: 5 fields of 10 columns and 13 numbers in.
        dense = 63 * 16 + 16 + 16 * 16 + 16 + 16 + 1 + 13
        assert 4 * dense <= rank["sent_bytes"]["all_reduce"] < 4 * dense + 200
        assert rank["sent_bytes"]["all_to_all_single"] > 0
    found = summarize(ranks, 3)
    assert found["waits_per_step"] >= 3


@pytest.mark.slow
def test_the_launcher_and_its_peer_train_on_the_same_clicks(clicks, tmp_path):
    import end_to_end

    for name in ("1024 fp32 all", "1024 sparse_adam keeps memory"):
        assert end_to_end.train(name, clicks, tmp_path) > 0
    # The run folder, with its checkpoints, is gone.
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_every_bar_has_a_contender():
    import end_to_end

    names = {f"{batch} {kind}" for batch in end_to_end.EPOCHS for kind in end_to_end.KINDS}
    assert set(end_to_end.BARS) <= names - set(end_to_end.OMITTED)


def test_runs_beside_other_processes_are_done_again_and_do_not_count(tmp_path, monkeypatch):
    import end_to_end
    from report import Report

    first, second = "1024 fp32 all", "1024 bf16 all"
    report = Report(tmp_path / "x.json")
    speeds = {first: iter([1.0, 5.0]), second: iter([2.0, RuntimeError("no bf16")])}
    shares = iter([0.5, 0.01, 0.02])

    def train(one, clicks, scratch):
        speed = next(speeds[one])
        if isinstance(speed, Exception):
            raise speed
        return speed

    monkeypatch.setattr(end_to_end, "train", train)
    monkeypatch.setattr(end_to_end.floors, "measure", lambda quick: FLOORS)
    monkeypatch.setattr(report.others, "share", lambda since=None: next(shares) if since else 0)
    turns = [first, second, second]
    end_to_end.measure(tmp_path, tmp_path, turns, report, again=5)
    found = report.found
    assert found["samples_per_second"] == {"1024 fp32 all": 5.0, "1024 bf16 all": 2.0}
    assert found["failed"] == ["1024 bf16 all: no bf16"]
    assert json.loads((tmp_path / "x.json").read_text())["runs"]["1024 fp32 all"] == [
        {"samples_per_second": 1.0, "other_processes": 0.5},
        {"samples_per_second": 5.0, "other_processes": 0.02},
    ]


def test_the_manual_shows_the_committed_results(tmp_path):
    import manual_tables

    for name in manual_tables.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        shown = page.split(manual_tables.BEGIN)[1].split(manual_tables.END)[0].strip()
        expected = manual_tables.page_tables(name, manual_tables.RESULTS)
        assert shown == expected, "run python benchmarks/manual_tables.py --write"
    # Quick results are not shown.
    (tmp_path / "growth.json").write_text('{"quick": true}')
    assert manual_tables.page_tables("docs/speed.md", tmp_path) == "Not measured yet."


def test_programs_have_the_default_allocator_or_the_asked_one(tmp_path, monkeypatch):
    from launched import KEEP_MEMORY, run_program

    program = tmp_path / "said.py"
    program.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("KEPT", "1")
    done = run_program([program], threads=2)
    said = json.loads(done.said)
    assert done.seconds > 0 < done.processor_seconds and done.peak_bytes > 1e6
    assert said["KEPT"] == "1" and said["OMP_NUM_THREADS"] == "2"
    assert not [name for name in said if name.startswith(("MALLOC_", "LD_PRELOAD"))]
    assert KEEP_MEMORY.items() <= json.loads(run_program([program], 2, KEEP_MEMORY).said).items()
    program.write_text("import sys; print('said'); sys.exit('why')")
    with pytest.raises(RuntimeError, match="why"):
        run_program([program])


def test_a_run_that_fell_back_to_fp32_is_no_result_of_bf16(tmp_path, monkeypatch):
    import launched

    said = ["dense layers in fp32 instead of bf16, which is 1.1 times slower on this CPU"] * 4
    said.append("dense layers in bf16, 2.1 times as fast as fp32 on this CPU")

    def run_program(command):
        (tmp_path / "benchmark").mkdir()
        (tmp_path / "benchmark/summary.json").write_text('{"auc": 0.7}')
        assert "train.precision=bf16" in command
        return launched.Done(said.pop(0), 1, 1, 1)

    monkeypatch.setattr(launched, "run_program", run_program)
    with pytest.raises(RuntimeError, match="used fp32 instead of bf16"):
        launched.launch(tmp_path, "bf16", [], tmp_path)
    assert launched.launch(tmp_path, "bf16", [], tmp_path) == {"auc": 0.7}
    assert said == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_floors_count_all_products_of_the_mlp():
    import floors

    assert floors.FLOPS == 2 * (273 * 400 + 400 * 400 + 400 * 400)
    torch.manual_seed(0)
    found = floors.measure(quick=True)
    assert found["copy_bytes_per_second"] > 1e8
    assert (
        floors.mlp_samples_per_second(found, "fp32", 65536)
        == (found["mlp_samples_per_second"]["fp32"]["2048"])
    )


@pytest.mark.slow
def test_a_checkpoint_takes_time_and_memory_and_leaves_nothing(clicks, tmp_path):
    import steps
    from training import DEEPFM

    folder = tmp_path / "checkpoints"
    overrides = [f"data.path={clicks}", *OVERRIDES]
    found = steps.windows_of_a_job(DEEPFM, overrides, folder, window=0.2, pairs=2)
    # Weights and two moments of 12 columns, and the dense layers'.
    assert 144 * found["ids"] < found["checkpoint_bytes"] < 200 * found["ids"]
    assert len(found["windows"]) == 4
    for one in found["windows"][1::2]:
        assert 0 < one["flush"] < one["stall"] < one["seconds"] and one["background"] > 0
    assert not folder.exists()


def test_the_share_of_checkpoints_is_that_of_pairs_of_windows():
    from steps import compared

    costs = {"flush": 0.25, "stall": 0.5, "background": 2, "peak": 25}
    seconds = ((10, 10.2), (20, 20.2), (30, 33))
    pairs = [({"seconds": a, "peak": 10}, {"seconds": b, **costs}) for a, b in seconds]
    found = compared([window for pair in pairs for window in pair])
    assert found["share_taken"] == pytest.approx(0.02)
    assert (found["flush_seconds"], found["stall_seconds"]) == (0.25, 0.5)
    assert found["background_seconds"] == 2
    assert (found["peak_bytes_without"], found["peak_bytes_with"]) == (10, 25)


def test_steps_with_train_reproducible_are_compared_with_those_without():
    from steps import with_and_without

    found = with_and_without(256, pairs=2)
    assert found["ratio"] > 0 < found["seconds_without"]


def test_metrics_and_scikit_learn_find_the_same_auc():
    from around_training import CASES, cost_of_metrics

    aucs = {name: cost_of_metrics(200_000, *case)["auc"] for name, case in CASES.items()}
    assert aucs["ranking"] == pytest.approx(aucs["scikit-learn's AUC"], abs=1e-9)


def test_torchrec_features_are_refused_as_the_manual_says():
    import torchrec_features

    told = json.loads((ROOT / "benchmarks/results/torchrec_features.json").read_text())["refused"]
    assert {name: torchrec_features.refusal(name) for name in torchrec_features.REFUSED} == told


def test_norms_are_averaged_over_the_rows_of_all_steps():
    import clip_norms

    def line(touched, clipped, norm):
        norms = dict.fromkeys(clip_norms.NORMS, norm)
        return {"counts": [{"from": 4, "touched": touched, "clipped": clipped, **norms}]}

    (found,) = clip_norms.by_count([line(1, 1, 5.0), line(3, 0, 1.0)])
    assert found == {"from": 4, "rows": 4, "clipped": 0.25, **dict.fromkeys(clip_norms.NORMS, 2.0)}
