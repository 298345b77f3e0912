"""The help of the launcher: the keys that people use, or those that a topic names."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path

from stampede.engine.config import config_type
from stampede.settings import SettingsError, all_keys, key_lines, shown, yaml_value

WIDTH = 100

# Of the keys, those that the short help shows, in its order, with what they are for.
_USED = {
    "preset": "auto: by the recipe; paper: as in the CowClip paper",
    "data.path": "files, plain, .gz or .zst, or globs of them",
    "data.schema_file": "what the columns mean; `stampede describe` writes one",
    "data.split": "sequential, random, by_column, files, ...",
    "model.name": "the network: deepfm, dcnv2, din, mmoe, ...",
    "model.dim": "width of the embeddings",
    "model.hidden": "widths of the MLP's hidden layers",
    "optim.embedding.lr": "learning rate of the tables",
    "optim.embedding.l2": "L2 of the tables",
    "optim.embedding.clip.granularity": "none, row or cowclip",
    "optim.dense.lr": "learning rate of the dense layers",
    "train.batch_size": "global batch size, over all ranks",
    "train.epochs": "passes over the training rows",
    "train.precision": "of the dense layers: fp32, tf32, bf16, auto",
    "evaluate.every": "steps between evaluations within an epoch; 0: none",
    "evaluate.patience": "evaluations without a better metric until it stops",
    "checkpoint.resume": "auto: continue from the newest checkpoint",
    "checkpoint.init_from": "run folder whose weights a new run starts from",
    "run.name": "name of the run folder; default: the file's name",
    "run.dir": "folder of the run folders",
    "run.overwrite": "delete the run folder of that name first",
}


def short_help() -> str:
    """The shipped configurations and the keys that people use, below the options."""
    lines = []
    # At the root, beside `engine/`; an installed wheel has none.
    configs = Path(__file__).resolve().parents[2] / "configs"
    if (configs / "quickstart.yaml").is_file():
        lines.append("shipped configurations:")
        for path in sorted(configs.glob("*.yaml")):
            first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            named = f"  {configs.name}/{path.name:<20} "
            lines.append(named + textwrap.shorten(first, WIDTH - len(named), placeholder=" ..."))
        lines.append("")
    defaults = {}
    for key in all_keys(config_type()):
        defaults.setdefault(key.path, key.default)
    lines.append("keys that people use, with defaults (null: by the recipe, which prints it):")
    for path, meaning in _USED.items():
        lines.append(f"  {f'{path} = {yaml_value(defaults[path])}':<44} {meaning}")
    lines.append(
        f"and {len(defaults) - len(_USED)} more: --help all, or of a section: --help optim"
    )
    return "\n".join(lines)


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
