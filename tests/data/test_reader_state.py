"""Reading resumed anywhere, on any number of ranks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def ordered(shuffle="global", seed=5, window_rows=0):
    order = Order(40, shuffle, seed, window_rows, 4)
    return GlobalBatches(numbered(40), FIELDS[:2], 8, 0, 1, order)


def test_states_of_other_data_or_orders_are_refused():
    loader = reader(numbered(40))
    next(iter(loader))
    state = loader.state_dict()
    for other, words in (
        (reader(numbered(41)), "rows=40, now it is 41"),
        (reader(numbered(40), batch_size=16), "batch_size=8, now it is 16"),
        (ordered("none"), r"shuffle='global'.*'none'"),
        (ordered(seed=6), r"seed=5,.* 6"),
    ):
        with pytest.raises(DataError, match=words):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="window_rows=8, now"):
        ordered("block", window_rows=16).load_state_dict(
            ordered("block", window_rows=8).state_dict()
        )
    # A window without a meaning may be another one.
    for shuffle in ("none", "global"):
        ordered(shuffle, window_rows=16).load_state_dict(
            ordered(shuffle, window_rows=8).state_dict()
        )
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
