"""Hostile input: valid documents, changed at random places into what nobody would write."""

import copy
import json
import math
import os
import re
from collections import Counter

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

TEXTS = [
    "", " ", "\n", "a" * 5000, "../../canary", "/canary", "canary", "..", ".", "a/../../canary",
    "a\0b", "\ud800", "\u202e", "é", "\uff11", "%s%n{}", "~", "null", "true", "nan", "1e400",
    "0x10", "12:00", "2024-03-01", "-", "__class__", "\\", "${HOME}", "$(touch canary)",
    "`touch canary`", "C:\\canary", "file:///canary", "*", "[a]", "train", "ids", "1_000",
]  # fmt: skip

NUMBERS = [
    0, 1, -1, 2, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**12,
    10**30, -(10**30), 10**400, 0.5, -0.5, 1.0, 1e10, 1e300, -1e300, 5e-324, math.inf, -math.inf,
    math.nan, True, False,
]  # fmt: skip


def deep(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def deep_mapping(levels):
    value = 0
    for _ in range(levels):
        value = {"a": value}
    return value


VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from([
        None, [], {}, [[]], {"a": 1}, [None], [1, "a", None], {"": 0}, [0] * 2000,
        {f"k{i}": i for i in range(500)},
    ]),
    st.sampled_from([10, 100]).map(deep),
    st.sampled_from([10, 100]).map(deep_mapping),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.sampled_from(NUMBERS + TEXTS), max_size=4),
)  # fmt: skip


def places(value, path=()):
    """Paths of all values of a tree, the root's first."""
    found = [path]
    children = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        found += places(child, (*path, key))
    return found


@st.composite
def changed_trees(draw, bases, values=VALUES, keys=(), most=3):
    """A tree of dicts and lists with a few random changes.

    Args:
        bases: valid trees.
        values: what is put into them.
        keys: names that keys are renamed to, besides hostile ones.
    """
    root = {"": json.loads(json.dumps(draw(st.sampled_from(bases))))}
    names = st.one_of(st.sampled_from(list(keys) or TEXTS), st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(places(root)[1:]))
        parent = root
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        # The root itself is seldom what is changed.
        what = draw(st.sampled_from(["set", "set", "set", "drop", "rename", "add", "twin", "wrap"]))
        if what == "set":
            parent[key] = copy.deepcopy(draw(values))
        elif what == "drop" and path != ("",):
            del parent[key]
        elif what == "rename" and isinstance(parent, dict) and path != ("",):
            parent[draw(names)] = parent.pop(key)
        elif what == "add" and isinstance(parent[key], dict):
            parent[key][draw(names)] = copy.deepcopy(draw(values))
        elif what == "add" and isinstance(parent[key], list):
            parent[key].append(copy.deepcopy(draw(values)))
        elif what == "twin" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif what == "wrap":
            parent[key] = draw(st.sampled_from([lambda v: [v], lambda v: {"a": v}, str]))(
                parent[key]
            )
    return root[""]


@st.composite
def changed_bytes(draw, content, snippets=(), most=4):
    """Bytes with a few random changes: cut, flipped, doubled, or with snippets in them."""
    content = bytearray(content)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(content)))
        what = draw(st.sampled_from(["cut", "flip", "insert", "delete", "double"]))
        if what == "cut":
            del content[at:]
        elif what == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "insert":
            content[at:at] = draw(
                st.sampled_from(list(snippets) or [b"\0"]) | st.binary(min_size=1, max_size=4)
            )
        elif what == "delete":
            del content[at : at + draw(st.integers(1, 30))]
        elif what == "double":
            content[at:at] = content[at : at + draw(st.integers(1, 200))]
    return bytes(content)


def fuzz(strategy, check, cases, *, start=0):
    """Run `check(case)`, which returns the sentence it got or None, on so many cases.

    The cases are the same in every run.

    Returns:
        How often each kind of sentence was seen, numbers and names left out.
    """
    seen = Counter()

    @seed(start)
    @settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def run(case):
        seen[kind_of(check(case))] += 1

    run()
    if os.environ.get("STAMPEDE_FUZZ_SHOW"):
        for kind, count in seen.most_common():
            print(f"{count:7d}  {kind}")
    return seen


def kind_of(sentence):
    """A sentence without what is particular about it."""
    if sentence is None:
        return "accepted"
    said = (sentence.strip().splitlines() or ["a sentence of white space"])[-1]
    said = re.sub(r"found .*?; (?=write|did|a number)", "found ...; ", said)
    said = re.sub(r"'.*'|\"[^\"]*\"", "'...'", said)
    said = re.sub(r"(/[^\s:;,]+)+", "PATH", said)
    said = re.sub(r"\([^():]*: ", "(KEY: ", said)
    said = re.sub(r"(unknown key|did you mean|allowed here).*", r"\1", said)
    said = re.sub(r"^(override '...'|PATH|line \d+|[^:\s]*)(, line \d+)?: ", "", said)
    said = re.sub(r"[-+]?\d[\d.,_e+]*", "0", said)
    return said[:100]
