"""Plans, the message if the tables do not fit, and sizes as people write them."""

from contextlib import nullcontext

import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from stampede.engine.config.load import load_config
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning import planner
from stampede.engine.planning.planner import Cluster, describe_plan, parse_bytes, search_plan
from stampede.engine.planning.tables import planned_data
from stampede.engine.planning.workload import workload
from stampede.engine.processes import processes
from stampede.optim import cowclip_sharders
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.settings import SettingsError
from support.paths import ROOT
from support.planning import planned_config

ROWS = 1_000_000
TWO_TABLES = [f"data.tables={{C1: {ROWS}, C2: {ROWS}}}", "model.hidden=[4]", "train.batch_size=8"]


def model_and_work(*overrides, world_size=1):
    config = load_config(ROOT / "configs/plan_10b.yaml", [*TWO_TABLES, *overrides])
    data = planned_data(config)
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    return model, workload(config, data, model, world_size, "cpu")


def types_of(*overrides, world_size=2):
    return planner.sharding_types(planned_config(*overrides, world_size=world_size), world_size)


def make_plan(sharding_type, *overrides):
    model, work = model_and_work(*overrides)
    with processes("cpu") as here:
        types = types_of(f"sharding.plan={sharding_type}", world_size=here.world_size)
        return planner.make_plan(model, cowclip_sharders(), types, lambda: work, here)


@pytest.mark.parametrize("asked", ["auto", *SHARDING_TYPES])
def test_the_asked_sharding_type_is_planned(asked):
    found = "table_wise" if asked == "auto" else asked
    assert describe_plan(make_plan(asked)) == f"2 tables {found}"


def test_a_plan_is_the_same_in_every_process(monkeypatch):
    """On one machine several sharding types cost the same; TorchRec has them in no fixed order."""
    usual = EmbeddingEnumerator._filter_sharding_types
    model, work = model_and_work(world_size=2)
    cluster = Cluster(2, 2, "cpu", 10**10)
    found = set()
    for reverse in (False, True):
        monkeypatch.setattr(
            EmbeddingEnumerator,
            "_filter_sharding_types",
            lambda *of, reverse=reverse: sorted(usual(*of), reverse=reverse),
        )
        plan = search_plan(model, cowclip_sharders(), SHARDING_TYPES, work, cluster)
        found.add(str(plan))
    assert len(found) == 1


def test_tables_that_do_not_fit_this_machine_are_refused(monkeypatch):
    # Weights and two moments of two tables.
    needed = 2 * ROWS * 12 * 4 * 3
    monkeypatch.setattr(planner, "memory_limit", lambda: 2 * needed)
    make_plan("auto")
    monkeypatch.setattr(planner, "memory_limit", lambda: needed)
    with pytest.raises(SettingsError, match=r"sharding.plan.*storage.*smaller tables"):
        make_plan("auto")


def test_auto_lets_the_planner_choose_among_the_exact_types():
    assert types_of() == SHARDING_TYPES
    # Reproducible runs add up in order, nor do they split tables with bags.
    reproducible, bags = ["train.reproducible=true", "train.tiles=2"], "data.ids_per_sample={C2: 3}"
    assert types_of(*reproducible) == ("table_wise", "row_wise")
    assert describe_plan(make_plan("row_wise", bags)) == "2 tables row_wise"
    plan = make_plan("row_wise", bags, *reproducible)
    assert describe_plan(plan) == "1 tables row_wise, 1 tables table_wise"


@pytest.mark.parametrize(
    "text, size",
    [("141GB", 141 * 10**9), ("80GiB", 80 * 2**30), ("1.5 TB", 15 * 10**11), ("4tib", 4 * 2**40)]
    + [(wrong, None) for wrong in ("", "GB", "141G", "-3GB", "0GB", "80gbit")],
)
def test_a_size_is_parsed(text, size):
    with nullcontext() if size else pytest.raises(SettingsError, match=r"found '.*141GB.*80GiB"):
        assert parse_bytes(text, "--device-memory") == size
