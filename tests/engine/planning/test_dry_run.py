"""Plans for clusters that need not exist."""

import json

import pytest

from stampede.data.prepare import main as prepare
from stampede.engine.config.load import load_config
from stampede.engine.errors import DoesNotFitError
from stampede.engine.planning.dry_run import dry_run, print_dry_run
from stampede.engine.planning.planner import Cluster
from stampede.settings import SettingsError
from support.paths import ROOT, shared
from support.planning import gpus, planned_config

pytestmark = pytest.mark.slow

TEN_BILLION = planned_config(world_size=128, batch_size=65536)


@pytest.fixture(scope="module")
def large():
    return dry_run(TEN_BILLION, gpus(128, 141))


def test_ten_billion_rows_fit_128_gpus(large):
    assert large.fits
    memory = large.costs.memory
    rows = 10**10
    # A copy of each dense layer on every rank, and of tables that the planner replicates.
    copied = sum(
        table.rows
        for name, table in large.work.tables.items()
        if table.field in large.costs.groups.get("data_parallel", {"fields": []})["fields"]
    )
    dense = 128 * large.work.dense_weight_bytes()
    assert memory["weights"].sum() == (rows + 127 * copied) * 12 * 4 + dense
    states = (rows + 127 * copied) * (2 * 12 * 4) + 2 * dense
    # And a counter of steps a row: one in each part of a row.
    counters = memory["optimizer_state"].sum() - states
    assert 4 * rows <= counters <= 3 * 4 * (rows + 127 * copied)
    assert large.costs.lookups.sum() >= 26 * 65536
    # No device holds 2 994 952 602 rows with two moments.
    (spec,) = (m["t_C3"].sharding_spec for m in large.plan.plan.values())
    assert len(spec.shards) > 1
    assert sum(s.shard_sizes[0] * s.shard_sizes[1] for s in spec.shards) == 2_994_952_602 * 12


def test_the_costs_are_written(large, tmp_path, monkeypatch):
    monkeypatch.setattr("stampede.engine.planning.dry_run.dry_run", lambda *_: large)
    out = tmp_path / "plan.json"
    print_dry_run(TEN_BILLION, gpus(128, 141), out)
    written = json.loads(out.read_text())
    assert written == json.loads(json.dumps(large.to_dict()))
    assert written["fits"] and len(written["memory_bytes"]["total"]) == 128
    assert written["tables"]["C3"]["rows"] == 2_994_952_602
    with pytest.raises(SettingsError, match=r"--plan-out.*cannot be written"):
        print_dry_run(TEN_BILLION, gpus(128, 141), tmp_path / "absent/plan.json")


def users(count, *overrides, world_size=8):
    """A job of a large table and a small one."""
    tables = f"data.tables={{user: {count}, item: 1000}}"
    return planned_config(tables, *overrides, world_size=world_size, batch_size=64 * world_size)


def test_a_shortfall_is_named_with_what_would_help():
    with pytest.raises(DoesNotFitError) as failure:
        print_dry_run(users(12e9), gpus(8, 80), None)
    said = str(failure.value)
    assert "of 68.00 GB (15% of 80.00 GB" in said and "too much" in said
    assert "8 of 8 ranks" in said and "--device-memory" in said
    devices = int(said.split("--world-size ")[1].split()[0])
    assert devices % 8 == 0
    assert dry_run(users(12e9, world_size=devices), gpus(devices, 80)).fits


@pytest.mark.parametrize(
    "config, gigabytes, proposal",
    [
        # 444 GB of weights and moments on 8 devices; 300 GB would do for Adagrad.
        (users(3e9), 60, r"optim.embedding.optimizer=(rowwise_adam|adagrad)"),
        (users(2e9, "sharding.plan=table_wise"), 80, r"sharding.plan=auto or row_wise"),
    ],
)
def test_what_is_enough_is_proposed(config, gigabytes, proposal):
    with pytest.raises(DoesNotFitError, match=proposal):
        print_dry_run(config, gpus(8, gigabytes), None)


def test_with_the_counter_of_steps_296_gb_fit_8_devices():
    assert dry_run(users(2e9, "sharding.plan=row_wise"), gpus(8, 80)).fits


def test_cpus_keep_nothing_free():
    config = planned_config("data.tables={user: 1e8}", world_size=4)
    assert dry_run(config, Cluster(4, 2, "cpu", 4 * 10**9)).fits
    with pytest.raises(DoesNotFitError):
        print_dry_run(config, Cluster(4, 2, "cpu", 35 * 10**8), None)


def test_synthetic_clicks_are_planned_without_drawing_them():
    config = load_config(ROOT / "configs/quickstart.yaml", ["data.scale=1.0"], 8)
    done = dry_run(config, gpus(8, 80))
    assert sum(table.rows for table in done.work.data.tables) == 33_762_577
    assert "exponent 1.3" in done.work.data.assumed


def test_prepared_data_tell_their_sizes_and_frequencies(tmp_path):
    log, folder = str(shared("data/avazu_20k.csv.gz")), str(tmp_path / "folder")
    assert prepare(["avazu", log, "--out", folder]) == 0
    keys = ["data.kind=prepared", f"data.path={folder}"]
    config = load_config(ROOT / "configs/table.yaml", keys, 4)
    data = dry_run(config, gpus(4, 80)).work.data
    assert len(data.tables) == 23 and data.id_bytes == 4  # the hour is two fields
    assert "rows of the training part" in data.assumed
    # The most frequent id stands first.
    largest = max(data.tables, key=lambda table: table.rows)
    assert largest.below(largest.rows // 10) > 0.2


def test_for_a_raw_log_the_command_that_prepares_it_is_named(tmp_path):
    log = shared("data/avazu_20k.csv.gz")
    keys = [f"data.path={log}", f"data.cache={tmp_path}"]
    config = load_config(ROOT / "configs/avazu.yaml", keys, 4)
    with pytest.raises(SettingsError, match=r"not prepared yet.*stampede prepare avazu.*plan_10b"):
        dry_run(config, gpus(4, 80))


def test_an_unknown_field_is_refused():
    with pytest.raises(SettingsError, match=r"'use' is not a field of data.tables"):
        dry_run(planned_config("data.ids_per_sample={use: 3.0}"), gpus(1, 80))
