"""Plans for clusters that need not exist, also as a user asks for them."""

import json

import pytest

from stampede.data.prepare_command import main as prepare
from stampede.engine.cli import main
from stampede.engine.config.load import load_config
from stampede.engine.errors import DoesNotFitError
from stampede.engine.planning.dry_run import dry_run, print_dry_run
from stampede.engine.planning.planner import Cluster
from stampede.settings import SettingsError
from support.paths import ROOT, shared
from support.planning import gpus, planned_config
from support.predicting import run_command


@pytest.mark.wide
def test_ten_billion_rows_fit_128_gpus_and_the_costs_are_written(tmp_path, monkeypatch):
    config = planned_config(world_size=128, batch_size=65536)
    large = dry_run(config, gpus(128, 141))
    memory = large.memory
    rows = 10**10
    # A copy of each dense layer on every rank, and of tables that the planner replicates.
    (sharding,) = large.plan.plan.values()
    copied = sum(
        table.rows
        for name, table in large.work.tables.items()
        if sharding[name].sharding_type == "data_parallel"
    )
    dense = 128 * large.work.common_bytes()[0]
    assert memory["weights"].sum() == (rows + 127 * copied) * 12 * 4 + dense
    states = (rows + 127 * copied) * (2 * 12 * 4) + 2 * dense
    # And a counter of steps a row: one in each part of a row.
    counters = memory["optimizer_state"].sum() - states
    assert 4 * rows <= counters <= 3 * 4 * (rows + 127 * copied)
    assert (large.milliseconds > 0).all()
    # No device holds 2 994 952 602 rows with two moments.
    spec = sharding["t_C3"].sharding_spec
    assert len(spec.shards) > 1
    assert sum(s.shard_sizes[0] * s.shard_sizes[1] for s in spec.shards) == 2_994_952_602 * 12
    monkeypatch.setattr("stampede.engine.planning.dry_run.dry_run", lambda *_: large)
    print_dry_run(config, gpus(128, 141), tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written == json.loads(json.dumps(large.to_dict()))
    assert len(written["memory_bytes"]["total"]) == 128
    # TorchRec's statistics have a line for each rank and each table.
    ranks = [line.split()[0] for line in written["torchrec"] if "(" in line and "GS: " in line]
    assert ranks == [str(rank) for rank in range(128)]
    with pytest.raises(SettingsError, match=r"--plan-out.*cannot be written"):
        print_dry_run(config, gpus(128, 141), tmp_path / "absent/plan.json")


def users(count, *overrides, world_size=8):
    """A job of a large table and a small one."""
    tables = f"data.tables={{user: {count}, item: 1000}}"
    return planned_config(tables, *overrides, world_size=world_size, batch_size=64 * world_size)


def test_a_shortfall_is_named_with_what_would_help():
    with pytest.raises(DoesNotFitError) as failure:
        print_dry_run(users(12e9), gpus(8, 80), None)
    said = str(failure.value)
    assert "of the 68.00 GB that a run may take" in said and "optimizer=rowwise_adam" in said
    devices = int(said.split(" ranks or more")[0].split()[-1])
    assert devices % 8 == 0
    dry_run(users(12e9, world_size=devices), gpus(devices, 80))


@pytest.mark.parametrize(
    "config, too_small, enough",
    [
        # With the counter of steps 296 GB.
        (users(2e9, "sharding.plan=row_wise"), gpus(8, 40), gpus(8, 80)),
        # CPUs keep nothing free.
        (
            planned_config("data.tables={user: 1e8}", world_size=4),
            Cluster(4, 2, "cpu", 35 * 10**8),
            Cluster(4, 2, "cpu", 4 * 10**9),
        ),
        # They hold the mean of the weights, 1.2 GB a rank; a GPU's is in main memory.
        (
            planned_config("data.tables={user: 1e8}", "train.averaging=2", world_size=4),
            Cluster(4, 2, "cpu", 4 * 10**9),
            Cluster(4, 2, "cpu", 52 * 10**8),
        ),
        (
            planned_config("data.tables={user: 1e8}", "train.averaging=2", world_size=4),
            gpus(4, 3.5 / 0.85),
            gpus(4, 4 / 0.85),
        ),
    ],
    ids=["counters of steps", "cpus", "mean", "mean aside"],
)
def test_what_is_enough_fits(config, too_small, enough):
    with pytest.raises(DoesNotFitError):
        dry_run(config, too_small)
    dry_run(config, enough)


@pytest.mark.wide
def test_synthetic_clicks_are_planned_without_drawing_them():
    config = load_config(ROOT / "configs/quickstart.yaml", ["data.scale=1.0"], 8)
    done = dry_run(config, gpus(8, 80))
    assert sum(table.rows for table in done.work.tables.values()) == 33_762_577


@pytest.mark.wide
def test_prepared_data_tell_their_sizes(tmp_path):
    log, folder = str(shared("data/avazu_20k.csv.gz")), str(tmp_path / "folder")
    config = load_config(
        ROOT / "configs/avazu.yaml", [f"data.path={log}", f"data.cache={tmp_path}"], 4
    )
    with pytest.raises(SettingsError, match=r"not prepared yet.*stampede prepare avazu.*plan_10b"):
        dry_run(config, gpus(4, 80))
    assert prepare(["avazu", log, "--out", folder]) == 0
    keys = ["data.kind=prepared", f"data.path={folder}"]
    work = dry_run(load_config(ROOT / "configs/table.yaml", keys, 4), gpus(4, 80)).work
    # The hour is two fields.
    assert len(work.tables) == 23


SMALL = ["configs/plan_10b.yaml", "data.tables={user: 1e8, item: 1000}", "train.batch_size=8192",
         "evaluate.batch_size=8192"]  # fmt: skip
GPUS = ["--plan", "--world-size", "16", "--device-memory"]
CRITEO = "configs/criteo_kaggle.yaml"


def test_the_command_ends_with_status_0_or_1(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = ["--devices-per-node", 4, "--plan-out", tmp_path / "plan.json"]
    status, said = run_command(main, *GPUS, "80GiB", *out, *SMALL)
    assert status == 0 and "fits: " in said and "100,001,000 rows" in said, said
    written = json.loads((tmp_path / "plan.json").read_text())
    cluster = written["cluster"]
    assert written["sharding"]["t_user"]
    assert (cluster["memory"], cluster["local_world_size"]) == (80 * 2**30, 4)
    status, said = run_command(main, *GPUS, "512MB", *SMALL)
    assert status == 1 and "error: sharding.plan=auto gives no plan for 16 ranks" in said


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([*GPUS, "80GB", CRITEO], "data.path is not given"),
        ([*GPUS, "80GB", CRITEO, "data.path=absent.tsv"], "absent.tsv: no"),
        (
            [*GPUS, "80GB", "configs/table.yaml", "data.kind=prepared", "data.path=absent"],
            "no prepared data here",
        ),
        *(
            ([*GPUS, size, *SMALL], f"--device-memory: found '{size}'; write a number above 0")
            for size in ("80", "much", "141G", "0GB", "80gbit")
        ),
        ([*GPUS, "80GB", *SMALL, "train.batch_size=100"], "number of ranks, 16"),
        ([*GPUS, "80GB", *SMALL, "--devices-per-node", "5"], "write 15 or 20 devices"),
        ([*GPUS, "80GB", *SMALL, "data.tables={user: 1.5}"], "data.tables.user: found 1.5"),
        (
            [*GPUS, "80GB", *SMALL, "data.ids_per_sample={use: 3.0}"],
            "'use' is not a field of data.tables",
        ),
        (["--plan", *SMALL], "--world-size is not given"),
        (["--plan", "--world-size", "0", "--device-memory", "1GB", *SMALL], "found 0"),
        (["--world-size", "16", *SMALL], "write --plan too"),
        ([*SMALL], "has no clicks to train on"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, said = run_command(main, *arguments)
    assert status == 2 and words in said, said
