"""`stampede importance RUN`: what a model loses without each column, as a table and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from stampede import RunFolderError, exit_status, open_run, stores

# Of a picture; the table has all.
_MOST_BARS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 2 for a user's mistake."""
    given = _parser().parse_args(arguments)

    def measure() -> None:
        if stores.is_url(given.run) and not given.out:
            # The store's copy of a run is that of the machine that trains it.
            raise RunFolderError(f"{given.run}: is in a store; write --out FOLDER, here or there")
        run = open_run(given.run, allow_import=given.allow_import)
        found = run.importance(
            part=given.part,
            rows=given.rows,
            repeats=given.repeats,
            goal=given.goal,
            seed=given.seed,
        )
        print("\n".join(table(found)))
        folder = given.out or run.path / "importance"
        try:
            with stores.outgoing(folder, overwrite=True) as out:
                out.mkdir(parents=True, exist_ok=True)
                found.to_csv(out / "importance.csv")
                draw(found, out / "importance.png")
        except OSError as failure:
            raise RunFolderError(
                f"{folder}: cannot be written ({failure.strerror or failure}); write another --out"
            ) from None
        print(f"wrote to {folder}: importance.csv, importance.png")

    return exit_status(measure)


def table(found: pd.DataFrame) -> Iterator[str]:
    """The lines of a table, of at most 100 columns."""
    about = found.attrs
    of_goal = f" of {about['goal']}" if about["goal"] else ""
    used = f"{about['rows']:,}"
    if about["rows"] < about["of_rows"]:
        used = f"{used} of {about['of_rows']:,}"
    yield (
        f"{about['part']} part, {used} rows: AUC{of_goal} {about['auc']:.4f}, "
        f"logloss {about['logloss']:.4f}"
    )
    yield f"shuffling a column, {about['repeats']} times each, costs (+- standard error)"
    names = [name if len(name) <= 40 else name[:38] + ".." for name in map(str, found.index)]
    width = max(6, *map(len, names))
    yield f"  {'column':<{width}}  {'AUC lost':>20}  {'logloss added':>20}"
    for name, row in zip(names, found.itertuples(index=False), strict=True):
        yield (
            f"  {name:<{width}}  {row.auc_lost:>9.5f} +- {row.auc_error:.5f}"
            f"  {row.logloss_added:>9.5f} +- {row.logloss_error:.5f}"
        )
    yield "a column whose information others have, too, costs less than it tells alone"


def draw(found: pd.DataFrame, path: Path) -> None:
    """A bar for each column, with its standard error, into a PNG file."""
    # Slow to import.
    from matplotlib.figure import Figure

    shown = found.head(_MOST_BARS)[::-1]
    figure = Figure(figsize=(5.4, 0.9 + 0.24 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh(places, shown["auc_lost"], xerr=shown["auc_error"], color="#0072b2", ecolor="#d55e00")
    # A dollar sign would begin a formula.
    axes.set_yticks(places, [name[:30].replace("$", r"\$") for name in map(str, shown.index)])
    axes.axvline(0, color="#000000", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    more = len(found) - len(shown)
    axes.set_xlabel("AUC lost" + f" (and {more} more columns)" * (more > 0))
    axes.set_title(f"{found.attrs['part']} AUC {found.attrs['auc']:.4f}", fontsize=10)
    figure.savefig(path, dpi=160)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede importance",
        description="Permutation importance: shuffles one column of the log after another among\n"
        "the rows of the test part and shows how much AUC the trained model loses.",
        epilog="example:\n  stampede importance runs/quickstart",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder, such as runs/quickstart")
    add("--part", choices=["train", "validation", "test"], default="test", help="default test")
    add("--rows", type=int, default=100_000, metavar="N", help="at most; default 100000")
    add("--repeats", type=int, default=5, metavar="N", help="shuffles of a column; default 5")
    goal = "of several; default: the one with the largest weight in evaluate.select_goals"
    add("--goal", metavar="GOAL", help=goal)
    add("--seed", type=int, default=0, help="of the shuffles; default 0")
    add("--out", metavar="FOLDER", help="default: importance in the run folder, if that is no URL")
    help = "execute the Python file of the network, if the run was trained with your own"
    add("--allow-import", action="store_true", help=help)
    return parser
