"""The edges of buckets, value by value."""

from collections import Counter


def edges_by_hand(values: list[float], buckets: int) -> list[float]:
    """The largest value of each bucket but the last."""
    known = sorted(set(values))
    if len(known) <= buckets:
        return known[:-1]
    # The most frequent one is set aside while it is more than a bucket of the rest.
    rest, own = sorted(values), set()
    while True:
        most = max(Counter(rest).values())
        # Of equally frequent ones the smallest.
        value = min(value for value, n in Counter(rest).items() if n == most)
        around = own | {value, known[max(known.index(value) - 1, 0)]}
        if most * (buckets - len(own)) <= len(rest) or len(around) >= buckets:
            break
        rest, own = [one for one in rest if one != value], around
    left = buckets - len(own)
    # Fractions, so that j / left * n is not rounded up.
    found = {rest[-(-j * len(rest) // left) - 1] for j in range(1, left)} | own
    return sorted(found - {known[-1]})
