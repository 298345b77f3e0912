"""What MkDocs does for this manual beside its plugins; and the page of all keys of a configuration.

python docs/hooks.py    # writes docs/configuration.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from stampede.engine.config import config_type
from stampede.files import write_file
from stampede.settings import Key, all_keys, yaml_value

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/configuration.md"
PACKAGES = ("data", "engine", "models", "optim")

HEAD = """# Configuration reference

Every key of a YAML file, written from the code by `python docs/hooks.py`. On the command line a key
is `train.epochs=3`. `python launch.py CONFIG --print-config` prints the values of a job. Where the
default is null, the page says who chooses; see [Defaults and the recipe](choices.md).
"""

# An attribute of any element but a link, `url(...)` or `@import`, with a host.
ELSEWHERE = (
    r"(?:<(?!a\b)\w[^>]*\s(?:src|href)\s*=|url\(|@import\b)\s*[\"']?\s*(?:https?:)?//[^\s>\"')]*"
)

# Bounds in pydantic's words and in those of a JSON schema.
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def configuration_page() -> str:
    """The page of all keys: a table for each section."""
    sections: dict[str, list[Key]] = {}
    for key in all_keys(config_type()):
        sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    lines = [HEAD]
    for section, keys in sections.items():
        lines += [f"## `{section}`" if section else "## The file itself", ""]
        kinds = {key.kinds for key in keys}
        deciding = sorted({kind.partition(": ")[0] for kind in kinds if kind})
        if len(kinds) > 1:
            lines += [
                f"In brackets: the values of `{name}` that have the key." for name in deciding
            ]
        elif deciding:
            lines.append(f"The values of `{deciding[0]}` that have these keys: {_kinds(keys[0])}.")
        lines += [""] if deciding else []
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        lines += [_row(key, told=len(kinds) > 1) for key in keys]
        lines.append("")
    return "\n".join(lines)


def _kinds(key: Key) -> str:
    """The values of another key that have this key, without that key's name."""
    return key.kinds.partition(": ")[2]


def _row(key: Key, told: bool) -> str:
    """A line of the table; `told`: with the values of another key that have this one."""
    default = "" if isinstance(key.default, BaseModel) else f"`{yaml_value(key.default)}`"
    meaning = f"{key.description} ({_kinds(key)})" if told and key.kinds else key.description
    allowed = "a section" if isinstance(key.default, BaseModel) else _values(key)
    meaning, one_of, choices = meaning.partition("; one of ")
    if one_of:
        allowed = ", ".join(f"`{choice}`" for choice in choices.split(", "))
    cells = (f"`{key.path.rpartition('.')[2]}`", allowed, default, meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _values(key: Key) -> str:
    described = TypeAdapter(key.field.annotation).json_schema()
    # A bound stands beside the type, or within it.
    for constraint in key.field.metadata:
        for name, word in BOUNDS.items():
            if getattr(constraint, name, None) is not None:
                for one in described.get("anyOf", [described]):
                    one[word] = getattr(constraint, name)
    return _words(described)


def _words(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_words(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{yaml_value(one)}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{yaml_value(schema['const'])}`"
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} of {_words(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"list of {_words(schema.get('items', {}))}"
    kind = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "null": "`null`",
        "object": "mapping",
    }.get(schema.get("type"), "a section" if "$ref" in schema else "text")
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {'2^63' if schema[name] == 2**63 else schema[name]}"
        for name, sign in signs.items()
        if name in schema
    ]
    return f"{kind} {' and '.join(bounds)}".rstrip() if schema.get("type") != "null" else kind


def on_startup(**_: Any) -> None:
    """Check the page of all keys; lay out the packages as they are imported, for mkdocstrings.

    Before the configuration is read: mkdocstrings leaves out a path that does not exist then.
    """
    if PAGE.read_text(encoding="utf-8") != configuration_page():
        raise _plugin_error(f"{PAGE}: keys have changed; run `python docs/hooks.py` and commit it")
    package = ROOT / "cache/docs/stampede"
    package.mkdir(parents=True, exist_ok=True)
    for path in (*(ROOT / "stampede").glob("*.py"), *(ROOT / name for name in PACKAGES)):
        link = package / path.name
        if not link.exists():
            link.symlink_to(path)


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures and tables of the benchmarks that the pages show."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for path in (*RESULTS.glob("*.png"), *RESULTS.rglob("*.md")):
        name = f"results/{path.relative_to(RESULTS)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point to these files within the site, and call the table of a sweep by the sweep's name."""
    if page.file.src_uri.startswith("results/sweeps/"):
        markdown = re.sub(r"\A# .*", f"# {Path(page.file.src_uri).stem}", markdown)
    return markdown.replace("](../benchmarks/results/", "](results/")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark the tables of keys, let keys break at dots, and link pictures to their files."""
    if page.file.src_uri == "configuration.md":
        html = f'<div class="keys">{html}</div>'
    html = re.sub(r"(?<=<td><code>)[\w.]+", lambda key: key.group().replace(".", ".<wbr>"), html)
    return re.sub(r'<img [^>]*src="([^"]+\.png)"[^>]*>', r'<a href="\1">\g<0></a>', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load something from elsewhere."""
    _refuse_elsewhere(page.file.src_uri, output)
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a style sheet that would."""
    for path in Path(config.site_dir).rglob("*.css"):
        _refuse_elsewhere(str(path), path.read_text(encoding="utf-8"))


def loaded_from_elsewhere(text: str) -> str | None:
    """What a page or a style sheet loads from another host, if anything; links are not loaded."""
    found = re.search(ELSEWHERE, text, flags=re.I)
    return found and found.group()


def _refuse_elsewhere(name: str, text: str) -> None:
    found = loaded_from_elsewhere(text)
    if found:
        raise _plugin_error(f"{name}: the site must work offline; found {found}")


def _plugin_error(message: str) -> Exception:
    from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]

    return PluginError(message)


if __name__ == "__main__":
    write_file(PAGE, configuration_page())
