"""The runs whose results must not depend on the plan or the number of processes."""

from support.one_table import CLASSES
from support.parity import Case, Table

PLANS = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
SUMS = (Table(40), Table(23, features=2), Table(1), Table(60))
# Widths that FBGEMM does not know.
ODD = (
    Table(40, dim=10, columns=(3, 4, 3)),
    Table(23, dim=7, features=2, columns=(6, 1)),
    Table(1, dim=1),
    Table(60, dim=10),
)
# Constants with which some rows or tables are clipped in some steps, and others not.
FAMILY = {
    "none": {"granularity": "none"},
    "row": {"granularity": "row", "threshold": 0.2},
    "cowclip": {},
}


def every_plan():
    """CowClip with Adam on every sharding type."""
    tables = {"grid_shard": SUMS}
    return [
        Case(plan, tables.get(plan, Case.tables), arguments={"rows": rows})
        for plan in PLANS
        for rows in ("all", "touched")
    ]


def queued():
    """As on a GPU where whole rows lie on one rank; split and replicated ones need sums at once."""
    mixed = ("table_wise", "row_wise", "column_wise", "data_parallel")
    all_rows, touched = ({"columns": 10, "weight_decay": 0.1}, False), ({"rows": "touched"}, True)
    chosen = (("table_wise", all_rows), ("row_wise", touched), (mixed, all_rows), (mixed, touched))
    return [
        Case(plan=plan, tables=SUMS, arguments=arguments, weighted=weighted, way="queued")
        for plan, (arguments, weighted) in chosen
    ]


def family():
    """Every clip on tables that are replicated, and split by rows, by columns and by both."""
    mixed = ("data_parallel", "grid_shard", "row_wise", "column_wise")
    return [
        Case(plan=mixed, tables=SUMS, arguments={"rows": rows, **clip})
        for clip in FAMILY.values()
        for rows in ("all", "touched")
    ]


def base_optimizers():
    """Every base optimizer, with columns beyond the clipped ones and decoupled decay."""
    plan, more = ("grid_shard", "data_parallel", "grid_shard", "column_wise"), {"columns": 10}
    cases = [
        Case(plan, SUMS, rule, {"rows": rows, "weight_decay": 0.1, **more})
        for rule in CLASSES
        for rows in ("all", "touched")
    ]
    return [*cases, Case("column_wise", SUMS, "sgd", {"momentum": 0.9})]


def own():
    """A rule and a clip of a user's own, also with columns beyond the clipped ones."""
    lion = {"betas": (0.9, 0.99), "lr": 1e-3}
    clip = {"granularity": "root_count", "threshold": 0.2}
    return [
        *(Case(plan, SUMS, "lion", {"rows": ("all", "touched")[place % 2], **lion, **clip})
          for place, plan in enumerate(PLANS)),
        *(Case(plan, SUMS, "lion", {**lion, "columns": 10}) for plan in PLANS[::3]),
        *(Case(plan, SUMS, arguments={**clip, "columns": 10}) for plan in PLANS[1::2]),
    ]  # fmt: skip


def corners():
    """What is rare: decay that is clipped itself, weights of samples, uneven shards."""
    return [
        Case("column_wise", SUMS, arguments={"l2": 1.0, "ratio": 1.5, "columns": 10}),
        Case("column_wise", weighted=True),
        Case("row_wise", SUMS, weighted=True),
        Case("data_parallel", weighted=True),
        Case("column_wise", (Table(30, 20), Table(9, 8), Table(11, 4)), arguments={"ratio": 0.4}),
        Case("row_wise", (Table(3, 4), Table(1, 8), Table(2, 4)), arguments={"ratio": 0.6}),
        Case("grid_shard", SUMS, arguments={"variant": "paper", "bound": 0.3}),
    ]


def odd_widths():
    """Rows that are no multiple of 4 columns, in parts of any width."""
    mixed = ("column_wise", "data_parallel", "row_wise", "table_wise")
    return [
        Case(plan=plan, tables=ODD, rule=rule, arguments={"rows": rows, "ratio": 0.4})
        for plans, rows, rule in (
            ((*PLANS[::2], mixed), "all", "adam"),
            ((*PLANS[1::2], mixed), "touched", "rowwise_adam"),
        )
        for plan in plans
    ]


def sequences():
    """Lookups of `EmbeddingCollection`, whose tables all have the same width."""
    odd = tuple(Table(table.rows, 6, table.features, columns=(2, 2, 2)) for table in SUMS[:2])
    plan = ("row_wise", "column_wise", "table_wise", "data_parallel")
    touched = {"rows": "touched"}
    return [
        Case(plan, SUMS, sequence=True, steps=8),
        *(Case(plan, odd, sequence=True, steps=8) for plan in ("row_wise", "column_wise")),
        Case("column_wise", SUMS, rule="rowwise_adam", sequence=True, steps=8),
        Case("row_wise", SUMS, rule="adagrad", sequence=True, steps=8, arguments=touched),
    ]
