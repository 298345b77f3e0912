"""Clipped rows by field and by count are those that the tables' update clipped."""

import pytest

from support.jobs import lines, run_small, without_times
from support.movie_runs import prepare_movies, train_on_movies
from support.ranks import run_ranks
from support.shop import shop, train_on_shop, write_shop

EVERY_STEP = ["train.clip_stats_every=1", "train.log_every=1"]


def sums(counts):
    counts = list(counts)
    return [sum(count[name] for count in counts) for name in ("touched", "clipped")]


def watched(folder):
    return [line for line in lines(folder / "small") if line["kind"] == "clipping"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["l2=0.3", "clip={granularity: row, threshold: 0.001}"])
def test_counts_are_those_of_the_update(tmp_path, option):
    run_small(tmp_path, [*EVERY_STEP, f"optim.embedding.{option}"])
    found = watched(tmp_path)
    touched = clipped = 0
    shares = [line["clipped_share"] for line in lines(tmp_path / "small") if "loss" in line]
    for line, share in zip(found, shares, strict=False):
        now = sums(line["fields"].values())
        assert now == sums(line["counts"])
        touched, clipped = touched + now[0], clipped + now[1]
        # Rows whose norm is the threshold but for rounding may fall on either side.
        assert clipped / touched == pytest.approx(share, abs=2 / touched)
    assert 0 < clipped < touched
    assert found[0]["left_out"] == [] and len(found[0]["fields"]) == 26
    # C9 has 3 ids.
    assert found[0]["fields"]["C9"]["touched"] == 3


@pytest.mark.slow
def test_counts_do_not_depend_on_the_ranks(tmp_path):
    options = ["train.clip_stats_every=3"]
    run_small(tmp_path, options)
    alone = watched(tmp_path)
    assert [line["step"] for line in alone] == [3, 6]
    # Watching changes no bit.
    run_small(tmp_path, ["run.name=unwatched"])
    assert without_times(tmp_path / "unwatched") == [
        line for line in without_times(tmp_path / "small") if line["kind"] != "clipping"
    ]
    (tmp_path / "two").mkdir()
    run_ranks(2, run_small, tmp_path / "two", options, 2)
    for found, expected in zip(watched(tmp_path / "two"), alone, strict=True):
        for one, other in zip(found.pop("counts"), expected["counts"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert found == {key: of for key, of in expected.items() if key != "counts"}


def test_norms_are_those_of_the_rows(tmp_path):
    """Of L2 alone the gradient is 2 l2 w; the threshold is the weights' norm times the count."""
    run_small(tmp_path, [*EVERY_STEP, "optim.embedding.l2=1e6", "optim.scaling.rule=none"])
    counts = [count for line in watched(tmp_path) for count in line["counts"]]
    for count in counts:
        assert count["gradient_norm"] == pytest.approx(2e6 * count["weight_norm"], rel=1e-4)
        times = count["threshold"] / count["weight_norm"]
        assert 0.999 * count["from"] < times < 2 * count["from"]


def test_fields_with_several_ids_are_left_out(tmp_path):
    run = train_on_movies(prepare_movies(tmp_path), "train.clip_stats_every=1")
    found = [line for line in lines(run) if line["kind"] == "clipping"]
    assert found and all(line["left_out"] == ["genres"] for line in found)
    touched, _ = sums(found[0]["fields"].values())
    assert touched > 0 and touched == sums(found[0]["counts"])[0]


def test_fields_whose_ids_have_weights_are_left_out(tmp_path):
    """Also with one id in each cell: an embedding is not its row, but the row times its weight."""
    frame = shop(200)[["clicked", "user", "item"]]
    frame["last"], frame["times"] = frame["item"], 0.5
    schema = "label: clicked\nids:\n  user: {min_count: 1}\n  item: {min_count: 3}\n"
    schema += "  last: {separator: '|', share: item, weights: times}\n"
    run = train_on_shop(write_shop(tmp_path / "shop", schema, frame), "train.clip_stats_every=1")
    found = [line for line in lines(run) if line["kind"] == "clipping"]
    assert found and all(line["left_out"] == ["item", "last"] for line in found)
    assert all(set(line["fields"]) == {"user"} for line in found)
