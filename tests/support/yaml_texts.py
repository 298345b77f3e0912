"""YAML as an attacker writes it."""

import json

from hypothesis import strategies as st

from support.fuzzing import changed_bytes

_BOMB = "[&a [x, x, x, x, x, x, x, x, x]" + "".join(
    f", &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(20)
) + "]"  # fmt: skip
_MERGES = "{a: &a {k: 1}" + "".join(
    f", {chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join([f'*{chr(97 + i)}'] * 9)}]}}"
    for i in range(20)
) + "}"  # fmt: skip


class Raw(str):
    """A piece of YAML that stands as it is."""


FRAGMENTS = [Raw(text) for text in (
    "!!python/object/apply:os.system ['touch canary']", "!!python/name:os.system",
    "!!python/object/new:subprocess.Popen [['touch', 'canary']]", "!!python/module:canary",
    "!!python/tuple [1]", "!canary x", "!<tag:yaml.org,2002:python/none> x", "!!int ''",
    "!!int '-'", "!!int x", "!!int 0x" + "f" * 9000, "!!int 1:2:3", "!!float ''", "!!float .",
    "!!float 1:2.5", "!!bool x", "!!bool ''", "!!timestamp x", "!!timestamp 2024-99-99",
    "!!timestamp 2024-01-01 00:00:00 +99:99", "!!binary x", "!!binary aGVsbG8=", "!!binary é",
    "!!set {a, b}", "!!set {[a], b}", "!!omap [a: 1]", "!!omap [1]", "!!pairs [a: 1]",
    "!!str [a]", "!!map [a]", "!!seq {a: 1}", "!!null x", "!!merge x", "!!value x", "&a [*a]",
    "&a {a: *a}", "&a {<<: *a}", "*absent", "{<<: 3}", "{<<: [3]}",
    "{<<: {epochs: 3}, epochs: 4}", "{=: 3}", "=", "{? [a]: 1}", "{{a: 1}: 2}", "{1: 2}",
    "{null: 1}", "{true: 1}", "{a: 1, a: 2}", _BOMB, _MERGES, "[" * 2000, "[" * 200 + "]" * 200,
    "{a: " * 400 + "1" + "}" * 400, "- - - -", "'", '"', '"\\0"', '"\\ud800"', '"\\U0010ffff"',
    '"\\x00"', '"\\UFFFFFFFF"', "|", "|9\n  x", ">-\n x", "#", "a: b: c", "[a, b", "{a",
    "9" * 5000, "1" * 400, "-0", "1e999", "1e-999", "1.e", "0b1", "0o17", "017", "1__0", ".inf",
    ".nan", "on", "yes", "~", "@", "`", "%", "!", "&", "*", "? ", "? x", ": x", "- x", "\t",
    "\u0085", "\ufeff", "\x01",
)]  # fmt: skip

_SNIPPETS = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"\t", b"\r", b"\n", b"\n\n",
    b"\n---\n", b"\n...\n", b"%YAML 9.9\n---\n", b"%TAG ! tag:yaml.org,2002:python/\n---\n", b": ",
    b"- ", b"? ", b"&a ", b"*a", b"!!python/object:os.x ", b"{", b"}", b"[", b"]", b"'", b'"', b"#",
    b"|", b">", b"<<: ", b"\xe2\x80\xa8", b"  ", b",",
]  # fmt: skip


def written(value) -> str:
    """A tree as YAML on one line, with raw pieces as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)}: {written(child)}" for key, child in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, float):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    return json.dumps(value)


def _key(key) -> str:
    return str(key) if isinstance(key, Raw) else json.dumps(key)


@st.composite
def yaml_files(draw, trees):
    """Bytes of a file: a tree in sections or on one line, some of them damaged."""
    tree = draw(trees)
    try:
        if isinstance(tree, dict) and draw(st.booleans()):
            text = "".join(f"{_key(key)}: {written(child)}\n" for key, child in tree.items())
        else:
            text = written(tree)
    except RecursionError:
        text = "[" * 3000
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)):
        return content
    return draw(changed_bytes(content, _SNIPPETS))
