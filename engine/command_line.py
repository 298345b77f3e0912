"""The command line of the launcher."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

from pydantic import BaseModel

from stampede.engine.config import Config, all_keys, load_config, to_yaml
from stampede.engine.processes import launched_rank, launched_world_size


def parse_command_line(arguments: Sequence[str], configs: Path) -> Config | None:
    """The configuration that the arguments ask for.

    Args:
        arguments: without the program's name.
        configs: folder of the shipped configurations.

    Returns:
        None where the arguments only ask to print something, which is done.

    Raises:
        SettingsError: the configuration cannot be used.
    """
    parser = _parser(configs)
    # Every rank parses; one speaks.
    with ExitStack() as stack:
        if launched_rank() != 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        parsed, unknown = parser.parse_known_args(arguments)
    wrong = [argument for argument in unknown if argument.startswith("-")]
    if wrong:
        parser.error(f"unknown option {wrong[0]}; see --help")
    config = load_config(Path(parsed.config), [*parsed.overrides, *unknown], launched_world_size())
    if parsed.print_config:
        if launched_rank() == 0:
            sys.stdout.write(to_yaml(config))
        return None
    return config


def _parser(configs: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Train a click-through-rate model.",
        usage="[torchrun --nproc_per_node N] launch.py CONFIG.yaml [section.key=value ...] "
        "[--print-config]",
        epilog=_shipped(configs) + "\n\n" + _keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a job; see the list below")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="replaces a value of the file",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the whole configuration, defaults filled in, as YAML and exit",
    )
    return parser


def _shipped(configs: Path) -> str:
    lines = ["shipped configurations:"]
    for path in sorted(configs.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"  {configs.name}/{path.name:<24} {first}")
    return "\n".join(lines)


def _keys() -> str:
    lines = ["keys, with defaults:"]
    for key in all_keys(Config):
        default = (
            "a section, see below" if isinstance(key.default, BaseModel) else repr(key.default)
        )
        lines.append(f"  {key.path} = {default}")
        indent = " " * 6
        text = f"{key.description} ({key.kinds})" if key.kinds else key.description
        lines += textwrap.wrap(text, 92, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
