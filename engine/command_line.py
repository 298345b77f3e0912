"""The command line of the launcher."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from stampede.engine.config import Config, all_keys, config_type, load_config, to_yaml
from stampede.engine.planning.planner import Cluster
from stampede.engine.planning.sizes import parse_bytes
from stampede.engine.processes import launched_rank, launched_world_size
from stampede.settings import SettingsError

_OF_THE_PLAN = (
    "--world-size",
    "--device-memory",
    "--devices-per-node",
    "--compute-device",
    "--plan-out",
)


@dataclass(frozen=True)
class Command:
    """What the arguments ask for.

    Attributes:
        config: of the run.
        cluster: the devices to plan the run for; None to run it.
        plan_out: file for the figures of the plan.
    """

    config: Config
    cluster: Cluster | None = None
    plan_out: Path | None = None


def parse_command_line(arguments: Sequence[str], configs: Path) -> Command | None:
    """What the arguments ask for.

    Args:
        arguments: without the program's name.
        configs: folder of the shipped configurations.

    Returns:
        None where the arguments only ask to print something, which is done.

    Raises:
        SettingsError: the configuration cannot be used, or an option of the plan.
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
    cluster = _cluster(parsed)
    world_size = launched_world_size() if cluster is None else cluster.world_size
    config = load_config(Path(parsed.config), [*parsed.overrides, *unknown], world_size)
    if parsed.print_config:
        if launched_rank() == 0:
            sys.stdout.write(to_yaml(config))
        return None
    return Command(config, cluster, parsed.plan_out)


def _cluster(parsed: argparse.Namespace) -> Cluster | None:
    """The devices to plan for; None where nothing is to be planned."""
    given = {name: getattr(parsed, _attribute(name)) for name in _OF_THE_PLAN}
    if not parsed.plan:
        useless = [name for name, value in given.items() if value is not None]
        if useless:
            raise SettingsError(f"{useless[0]} is an option of the dry run; write --plan too")
        return None
    for name in ("--world-size", "--device-memory"):
        if given[name] is None:
            raise SettingsError(
                f"--plan: {name} is not given; write which devices to plan for, such as --plan "
                "--world-size 128 --device-memory 141GB"
            )
    world_size = parsed.world_size
    node = parsed.devices_per_node or min(8, world_size)
    for name, value in (("--world-size", world_size), ("--devices-per-node", node)):
        if value < 1:
            raise SettingsError(f"{name}: found {value}; write a number of at least 1")
    if world_size % node:
        nodes = world_size // node
        raise SettingsError(
            f"--world-size {world_size} is not a multiple of --devices-per-node {node}; write "
            f"{max(1, nodes) * node} or {(nodes + 1) * node} devices, or another number for a node"
        )
    memory = parse_bytes(parsed.device_memory, "--device-memory")
    return Cluster(world_size, node, parsed.compute_device or "cuda", memory)


def _parser(configs: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="Train a click-through-rate model.",
        usage="[torchrun --nproc_per_node N] launch.py CONFIG.yaml [section.key=value ...] "
        "[--print-config]\n       launch.py --plan --world-size N --device-memory SIZE CONFIG.yaml "
        "[section.key=value ...]",
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
    plan = parser.add_argument_group(
        "dry run",
        "memory, load and communication of every rank of a cluster that need not be there;\n"
        "exit status 1 where the run does not fit",
    )
    plan.add_argument("--plan", action="store_true", help="plan the run instead of running it")
    plan.add_argument("--world-size", type=int, metavar="N", help="number of devices; required")
    plan.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of a device, such as 141GB (10^9 bytes) or 80GiB (2^30 bytes); required",
    )
    plan.add_argument(
        "--devices-per-node", type=int, metavar="N", help="devices of a machine; default 8"
    )
    plan.add_argument(
        "--compute-device", choices=["cuda", "cpu"], help="kind of the devices; default cuda"
    )
    plan.add_argument(
        "--plan-out", type=Path, metavar="FILE.json", help="write the figures of every rank there"
    )
    return parser


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _shipped(configs: Path) -> str:
    lines = ["shipped configurations:"]
    for path in sorted(configs.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"  {configs.name}/{path.name:<24} {first}")
    return "\n".join(lines)


def _keys() -> str:
    lines = ["keys, with defaults:"]
    for key in all_keys(config_type()):
        default = (
            "a section, see below" if isinstance(key.default, BaseModel) else repr(key.default)
        )
        lines.append(f"  {key.path} = {default}")
        indent = " " * 6
        text = f"{key.description} ({key.kinds})" if key.kinds else key.description
        lines += textwrap.wrap(text, 92, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)
