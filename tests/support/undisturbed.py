"""Runs that nothing happens to, which others are compared with."""

from support.jobs import run_small
from support.ranks import run_ranks


def undisturbed_runs(tmp_path_factory, overrides):
    """A function that gives the folder of such a run by its number of ranks; each is made once."""
    made = {}

    def run(ranks):
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
            run_ranks(ranks, run_small, folder, overrides, ranks)
            made[ranks] = folder / "small"
        return made[ranks]

    return run
