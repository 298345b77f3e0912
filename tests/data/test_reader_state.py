"""Reading resumed anywhere, on any number of ranks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful

from stampede.data import DataError, GlobalBatches, Order
from support.batches import FIELDS, global_batches, numbered, reader, rows_of


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    stop=st.integers(0, 11),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from(["global", "block", "rotate", "none"]),
    ahead=st.sampled_from([0, 3]),
)
def test_resumed_anywhere_on_any_number_of_ranks(stop, before, after, shuffle, ahead):
    """30 rows are 4 batches an epoch; 3 epochs of them."""
    part = numbered(30)

    def run(loader, epochs):
        return [sorted(rows_of(batch)) for _ in range(epochs) for batch in loader]

    whole = [run(reader(part, after, rank, shuffle=shuffle), 3) for rank in range(after)]
    states = []
    for rank in range(before):
        loader = reader(part, before, rank, shuffle=shuffle, ahead=ahead)
        for seen in range(stop):
            if seen % 4 == 0:
                epoch = iter(loader)
            next(epoch)
        states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1
    for rank in range(after):
        loader = reader(part, after, rank, shuffle=shuffle, ahead=ahead)
        loader.load_state_dict(json.loads(states[0]))
        assert run(loader, 3 - stop // 4) == whole[rank][stop:]


def test_the_state_covers_what_was_consumed_and_a_break_can_be_continued():
    loader = reader(numbered(40), ahead=4)
    assert isinstance(loader, Stateful)
    whole = [rows_of(batch) for batch in reader(numbered(40)).epoch(0)]
    seen = []
    for batch in loader:
        seen.append(rows_of(batch))
        assert loader.state_dict()["samples"] == 8 * len(seen)
        if len(seen) == 2:
            break
    seen += [rows_of(batch) for batch in loader]
    assert seen == whole
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)


def test_states_of_other_data_or_orders_are_refused():
    loader = reader(numbered(40))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(DataError, match="rows=40, now it is 41"):
        reader(numbered(41)).load_state_dict(state)
    with pytest.raises(DataError, match=r"shuffle='global'.*'none'"):
        reader(numbered(40), shuffle="none").load_state_dict(state)
    with pytest.raises(DataError, match="batch_size=8, now it is 16"):
        reader(numbered(40), batch_size=16).load_state_dict(state)
    other = GlobalBatches(numbered(40), FIELDS[:2], 8, 0, 1, Order(40, "global", 6, 0, 4))
    with pytest.raises(DataError, match=r"seed=5,.* 6"):
        other.load_state_dict(state)
    # What is read ahead may change, what is read may not.
    for shuffle in ("none", "global", "block"):
        small, large = (
            GlobalBatches(numbered(40), FIELDS[:2], 8, 0, 1, Order(40, shuffle, 5, window, 4))
            for window in (8, 16)
        )
        if shuffle == "block":
            with pytest.raises(DataError, match="window_rows=8, now"):
                large.load_state_dict(small.state_dict())
        else:
            large.load_state_dict(small.state_dict())
    # At the beginning of an epoch the batch size may change.
    for _ in loader:
        pass
    larger = reader(numbered(40), batch_size=16)
    larger.load_state_dict(loader.state_dict())
    assert [sorted(rows_of(b)) for b in larger] == global_batches(
        numbered(40), 1, epoch=1, batch_size=16
    )


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("superseded_by", ["iter", "epoch", "load_state_dict"])
def test_only_the_newest_iterator_moves_the_position(ahead, superseded_by):
    loader = reader(numbered(40), ahead=ahead)
    old = iter(loader)
    next(old)
    new = {
        "iter": lambda: iter(loader),
        "epoch": lambda: loader.epoch(0),
        "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
    }[superseded_by]()
    position = loader.state_dict()
    with pytest.raises(RuntimeError, match="use the newest one"):
        next(old)
    assert loader.state_dict() == position
    left = [rows_of(batch) for batch in (loader if new is None else new)]
    whole = [rows_of(batch) for batch in reader(numbered(40)).epoch(0)]
    assert left == whole[0 if superseded_by == "epoch" else 1 :]
