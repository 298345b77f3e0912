"""Plans, and the message if the tables do not fit."""

import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from stampede.engine.config.load import load_config
from stampede.engine.errors import DoesNotFitError
from stampede.engine.planning import planner
from stampede.engine.planning.planner import Cluster, describe_plan, search_plan
from stampede.engine.processes import processes
from stampede.optim import cowclip_sharders
from stampede.optim.sharded.supported import SHARDING_TYPES
from support.paths import ROOT
from support.planning import model_and_work_of, planned_config

ROWS = 1_000_000
TWO_TABLES = [f"data.tables={{C1: {ROWS}, C2: {ROWS}}}", "model.hidden=[4]", "train.batch_size=8"]


def model_and_work(*overrides, world_size=1):
    config = load_config(ROOT / "configs/plan_10b.yaml", [*TWO_TABLES, *overrides])
    return config, *model_and_work_of(config, world_size)


def types_of(*overrides, world_size=2):
    return planner.sharding_types(planned_config(*overrides, world_size=world_size), world_size)


def make_plan(sharding_type, *overrides):
    config, model, work = model_and_work(f"sharding.plan={sharding_type}", *overrides)
    with processes("cpu") as here:
        return planner.make_plan(config, model, cowclip_sharders(), lambda: work, here)


@pytest.mark.parametrize("asked", ["auto", *SHARDING_TYPES])
def test_the_asked_sharding_type_is_planned(asked):
    found = "table_wise" if asked == "auto" else asked
    assert describe_plan(make_plan(asked)) == f"2 tables {found}"


def test_a_plan_is_the_same_in_every_process(monkeypatch):
    """On one machine several sharding types cost the same; TorchRec has them in no fixed order."""
    usual = EmbeddingEnumerator._filter_sharding_types
    config, model, work = model_and_work(world_size=2)
    cluster = Cluster(2, 2, "cpu", 10**10)
    found = set()
    for reverse in (False, True):
        monkeypatch.setattr(
            EmbeddingEnumerator,
            "_filter_sharding_types",
            lambda *of, reverse=reverse: sorted(usual(*of), reverse=reverse),
        )
        plan = search_plan(config, model, cowclip_sharders(), work, cluster)
        found.add(str(plan))
    assert len(found) == 1


def test_tables_that_do_not_fit_this_machine_are_refused(monkeypatch):
    # Weights and two moments of two tables.
    needed = 2 * ROWS * 12 * 4 * 3
    monkeypatch.setattr(planner, "memory_limit", lambda: 2 * needed)
    make_plan("auto")
    monkeypatch.setattr(planner, "memory_limit", lambda: needed)
    with pytest.raises(DoesNotFitError, match=r"sharding.plan.*storage.*smaller tables"):
        make_plan("auto")


def test_auto_lets_the_planner_choose_among_the_exact_types():
    assert types_of() == SHARDING_TYPES
    # Reproducible runs add up in order, nor do they split tables with bags.
    reproducible, bags = ["train.reproducible=true", "train.tiles=2"], "data.ids_per_sample={C2: 3}"
    assert types_of(*reproducible) == ("table_wise", "row_wise")
    assert describe_plan(make_plan("row_wise", bags)) == "2 tables row_wise"
    plan = make_plan("row_wise", bags, *reproducible)
    assert describe_plan(plan) == "1 tables row_wise, 1 tables table_wise"
