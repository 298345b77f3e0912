"""The help of the launcher: the keys that people use, or those that a topic names."""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path

from stampede.engine.config import config_type
from stampede.settings import Key, SettingsError, all_keys, key_lines, shown, yaml_value

WIDTH = 100

# Of the keys, those that the short help shows, in its order.
_USED = (
    "preset", "data.path", "data.schema_file", "data.split", "model.name", "model.dim",
    "model.hidden", "optim.embedding.lr", "optim.embedding.l2",
    "optim.embedding.clip.granularity", "optim.dense.lr", "train.batch_size", "train.epochs",
    "train.precision", "evaluate.every", "evaluate.patience", "checkpoint.resume",
    "checkpoint.init_from", "run.name", "run.dir", "run.overwrite",
)  # fmt: skip


def short_help() -> str:
    """The shipped configurations and the keys that people use, below the options."""
    lines = []
    # At the root, beside `engine/`; an installed wheel has none.
    configs = Path(__file__).resolve().parents[2] / "configs"
    if (configs / "quickstart.yaml").is_file():
        lines.append("shipped configurations:")
        for path in sorted(configs.glob("*.yaml")):
            first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            lines.append(_on_one_line(f"  {configs.name}/{path.name:<20} ", first))
        lines.append("")
    keys: dict[str, Key] = {}
    for key in all_keys(config_type()):
        keys.setdefault(key.path, key)
    lines.append("keys that people use, with defaults (null: by the recipe, which prints it):")
    for path in _USED:
        shown_key = f"  {f'{path} = {yaml_value(keys[path].default)}':<44} "
        lines.append(_on_one_line(shown_key, keys[path].description))
    lines.append(f"and {len(keys) - len(_USED)} more: --help all, or of a section: --help optim")
    return "\n".join(lines)


def _on_one_line(name: str, meaning: str) -> str:
    first = re.split("[;.] ", meaning)[0]
    return name + textwrap.shorten(first, WIDTH - len(name), placeholder=" ...")


def help_on(topic: str) -> str:
    """The keys that a topic names: `all`, a section, a key, or the last word of a key.

    Raises:
        SettingsError: it names none.
    """
    keys = all_keys(config_type())
    found = keys
    if topic != "all":
        found = [key for key in keys if f"{key.path}.".startswith(f"{topic}.")]
        found = found or [key for key in keys if key.path.split(".")[-1] == topic]
    if found:
        return "\n".join(key_lines(found))
    parts = [key.path.split(".") for key in keys]
    paths = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    near = difflib.get_close_matches(topic, sorted(paths), 1)
    if not near:
        # Of the key's own name.
        names = {path.split(".")[-1]: path for path in sorted(paths)}
        near = [names[one] for one in difflib.get_close_matches(topic.split(".")[-1], names, 1)]
    sections = ", ".join(config_type().model_fields)
    meant = f"did you mean {near[0]!r}? Or " if near else ""
    raise SettingsError(
        f"--help {shown(topic)}: there is no such key; {meant}write all, a key such as "
        f"train.epochs, or one of {sections}"
    )
