"""What the README and the manual show works."""

import importlib
import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from stampede.engine.cli import _COMMANDS, parse_command_line
from stampede.engine.cli import _parser as launch_parser
from stampede.engine.config import config_type
from stampede.engine.config.load import load_config
from stampede.engine.reading import open_dataset
from stampede.engine.sweep.spec import load_sweep
from stampede.models import network, network_names
from stampede.models.registry import _NETWORKS
from stampede.optim.clip import CowClip, row_threshold
from stampede.settings import all_keys, parse_yaml
from support.paths import ROOT
from support.waiting import HANG

PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
# Blocks that stand on several pages run once.
PYTHON_BLOCKS = {
    block: f"{name}:{at}"
    for name, text in reversed(PAGES.items())
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.S))
}


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=PYTHON_BLOCKS.values())
def test_python_blocks_run(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # A network that is registered here is gone afterwards.
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))
    exec(compile(block, PYTHON_BLOCKS[block], "exec"), {"__name__": "__main__"})


def test_there_are_examples_of_the_api_a_network_for_torchrec_and_for_plain_pytorch():
    in_readme = [block for block in PYTHON_BLOCKS if block in PAGES["README.md"]]
    (network,) = [block for block in PYTHON_BLOCKS if "@register(" in block]
    plain, torchrec, api = sorted(in_readme, key=PAGES["README.md"].index, reverse=True)
    assert "from stampede import open_run, train" in api
    assert network in (ROOT / "examples/own_network/fwfm.py").read_text(encoding="utf-8")
    assert "cowclip_sharders" in torchrec
    assert "sparse=True" in plain


@pytest.mark.parametrize("page", PAGES)
def test_excerpts_are_lines_of_the_file_they_name(page):
    for name, lines in re.findall(r"```py\n# (\S+)\n(.*?)```", PAGES[page], flags=re.S):
        assert lines in (ROOT / name).read_text(encoding="utf-8"), name


def commands_of(page):
    """Of `stampede` and `launch.py` on a page: the words of each, and its number of processes."""
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGES[page], flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            if re.match(r"(python|torchrun .*) launch.py |stampede [a-z]", line):
                words = shlex.split(line, comments=True)
                processes = words[words.index("--nproc_per_node") + 1] if "torchrun" in words else 1
                start = words.index("launch.py") if "launch.py" in words else 0
                yield words[start:], processes


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words, processes in commands_of(page):
        if words[0] == "launch.py":
            monkeypatch.setenv("WORLD_SIZE", str(processes))
            assert parse_command_line(words[1:]), words
        else:
            name = _COMMANDS[words[1]][0]
            assert importlib.import_module(name)._parser().parse_intermixed_args(words[2:]), words


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_are_named_exist(page):
    keys = {key.path for key in all_keys(config_type())}
    sections = sorted({key.partition(".")[0] for key in keys if "." in key})
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?:[=:][^`]*)?`", PAGES[page])
    not_keys = {"model.columns", "model.score_rows", "model.fused_optimizer"}
    for name in set(named) - not_keys:
        assert name in keys or any(key.startswith(f"{name}.") for key in keys), name


def commands_in_prose():
    """Commands that the text of a page names: its name, and their words."""
    for name, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
        for span in re.findall(r"`([^`]+)`", prose):
            if re.match(r"(stampede|python|torchrun|make|pip|pytest) \S", span):
                yield name, shlex.split(span)


# Of other projects, on the page for those who come from them.
THEIRS = {"data_utils.py", "run_expid.py"}


@pytest.mark.parametrize("page, words", commands_in_prose(), ids=str)
def test_commands_in_prose_exist_with_their_options(page, words):
    """What they lack, such as a file, the reader adds; make's targets have a test of their own."""
    program, *rest = words
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        program = "python"
        rest = ["-m"] * given.module + [given.training_script, *given.training_script_args]
    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    if program == "pip":
        assert rest in (["install", "."], ["install", "onnxscript"])
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))
    elif program == "stampede" and rest != ["--help"]:
        name, parser = rest[0], launch_parser("stampede train")
        if name != "train":
            parser = importlib.import_module(_COMMANDS[name][0])._parser()
        assert options <= set(parser._option_string_actions)
    elif program == "python" and rest[0] == "launch.py":
        assert options <= set(launch_parser("launch.py")._option_string_actions)
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1])
    elif program == "python":
        assert rest[0] in THEIRS or (ROOT / rest[0]).is_file()


def test_commands_are_found_on_the_pages():
    found = [words for page in PAGES for words, _ in commands_of(page)]
    assert len(found) > 25
    assert len({tuple(words) for _, words in commands_in_prose()}) > 25
    assert {words[1] for words in found if words[0] == "stampede"} >= {
        "describe", "prepare", "predict", "export", "report", "sweep",
    }  # fmt: skip


def test_the_table_of_networks_holds_all_with_their_options():
    rows = re.findall(r"^\| (`[^|]*) \| \[[^|]* \| ?([^|]*)\|$", PAGES["networks.md"], flags=re.M)
    shown = {
        name: dict(re.findall(r"`(\w+): ([^`]*)`", options))
        for names, options in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    ours = {
        name: network(name)
        for name in network_names()
        if network(name).module.__module__.startswith("stampede.")
    }
    assert shown.keys() == ours.keys()
    for name, found in ours.items():
        defaults = {key: parse_yaml(text, "networks.md") for key, text in shown[name].items()}
        assert found.options(**defaults) == found.options()
        assert defaults.keys() == found.options.model_fields.keys()


def test_the_shape_it_shows_is_that_of_the_quickstart():
    shown = re.search(
        r"\"C1\"\)\.embedding\.shape\ntorch.Size\(\[(\d+), (\d+)\]\)", PAGES["index.md"]
    )
    config = load_config(ROOT / "configs/quickstart.yaml")
    rows = open_dataset(config, None).vocabulary_sizes["C1"]
    assert [int(number) for number in shown.groups()] == [rows, config.model.dim]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_pages_that_are_named_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", PAGES[page]):
        assert (folder / link).exists(), link
    for name in re.findall(r"`([\w./-]+\.(?:yaml|png|json|py|md))`", PAGES[page]):
        if not name.startswith(("runs/", "cache/")) and "/" in name:
            assert (ROOT / name).exists(), name
    # In commands, too.
    for name in re.findall(r"(?<![\w-])(?:tests|examples)/[\w/.]*\w", PAGES[page]):
        assert (ROOT / name).exists(), name


def test_the_functions_on_the_way_of_a_batch_exist():
    rows = re.findall(r"^\| `([\w/.]+)` \| (.*) \|$", PAGES["how-it-works.md"], flags=re.M)
    assert 8 <= len(rows) <= 12
    for file, text in rows:
        for name in re.findall(r"`([\w.]+)`", text):
            if file.endswith(".py"):
                module = importlib.import_module(f"stampede.{file[:-3].replace('/', '.')}")
                assert attrgetter(name)(module).__module__ == module.__name__, name
            else:
                assert f" {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_the_threshold_it_shows_is_computed():
    (formula,) = re.findall(r"t = (.*)\n", PAGES["how-it-works.md"])
    ratio, bound, columns = 0.7, 0.02, 9
    clip = CowClip(ratio=ratio, bound=bound)
    for norm, count in ((0.5, 3), (0.5, 0), (1e-3, 2), (0.0, 0)):
        names = {"r": ratio, "zeta": bound, "D": columns, "w": norm, "c": count}
        expected = eval(formula.replace("|w|", "w"), {"sqrt": math.sqrt, "max": max}, names)
        found = row_threshold(torch.tensor([norm]), torch.tensor([count]), columns, clip)
        assert found.item() == pytest.approx(expected)


def test_the_errors_of_an_auc_follow_the_formula_it_shows():
    page = PAGES["experiments.md"]
    q1, q2, se = re.findall(r"^(?:Q1|Q2|SE) = (.*)$", page, flags=re.M)
    for shown, auc, clicks, rows in (("0.018", 0.706, 301, 2000), ("0.012", 0.700, 671, 4000)):
        assert f"{shown} ([formula](#the-error-of-an-auc))" in page
        names = {"A": auc, "n1": clicks, "n0": rows - clicks, "sqrt": math.sqrt}
        names |= {"Q1": eval(q1, names), "Q2": eval(q2, names)}
        assert f"{eval(se, names):.3f}" == shown


def test_the_sweep_it_shows_can_be_loaded(tmp_path):
    (block,) = re.findall(r"```yaml\n(config: .*?)```", PAGES["experiments.md"], flags=re.S)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "criteo_kaggle.yaml").symlink_to(ROOT / "configs/criteo_kaggle.yaml")
    (tmp_path / "sweeps/mine.yaml").write_text(block)
    sweep = load_sweep(tmp_path / "sweeps/mine.yaml", ["data.path=log.tsv"])
    assert sweep.count == 2 * 2 * 2
    assert sweep.config_of(sweep.points[0].trial(1)).train.batch_size == 1024


def test_every_table_of_a_sweep_is_linked():
    for path in (ROOT / "benchmarks/results/sweeps").glob("*.md"):
        link = f"](../benchmarks/results/sweeps/{path.name})"
        assert link in PAGES["experiments.md"], f"{path.name}: link it from docs/experiments.md"


def test_the_picture_is_that_of_its_script():
    assert script("picture").picture() == (ROOT / "docs/images/batch.svg").read_text("utf-8")


def test_the_readme_is_short_and_names_every_page():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 250
    what = readme.split("\n\n")[1]
    assert len(what.splitlines()) <= 5
    for title in ("Your own log", "From Python"):
        _, *block = readme.split(f"## {title}\n")[1].split("```")[1].splitlines()
        assert len(block) <= 10
    for page in PAGES:
        assert page == "README.md" or f"](docs/{page})" in readme, page


def test_commands_it_shows_are_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = "\n".join(PAGES.values())
    targets = set(re.findall(r"(?:^|`)make (\w+)", shown, flags=re.M))
    assert {"train", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_page_of_all_keys_is_that_of_the_code():
    page = PAGES["configuration.md"]
    assert page == script("hooks").configuration_page(), "write it anew: python docs/hooks.py"
    shown = {
        f"{section}.{key}".lstrip(".")
        for section, rows in re.findall(
            r"^## (?:`(.*)`|.*)\n\n(?:[^|].*\n\n)?((?:\|.*\n)+)", page, flags=re.M
        )
        for key in re.findall(r"^\| `(\w+)` ", rows, flags=re.M)
    }
    assert shown == {key.path for key in all_keys(config_type())}
    assert "| `epochs` | whole number >= 1 or `null` | `null` |" in page
    assert "| `granularity` | `none`, `global`, `field`, `row`," in page
    assert "| `betas` | 2 of number >= 0 and < 1 | `[0.9, 0.999]` |" in page


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["strict"]
    listed = re.findall(r"[\w-]+\.md", str(site["nav"]))
    assert sorted(listed) == sorted(PAGES.keys() - {"README.md"})


@pytest.mark.parametrize(
    "package", ["stampede", "stampede.optim", "stampede.data", "stampede.models"]
)
def test_the_api_reference_has_every_public_name(package):
    page = PAGES["api.md"]
    listed = dict(
        reversed(name.rsplit(".", 1)) for name in re.findall(r"^::: ([\w.]+)", page, flags=re.M)
    )
    for names in re.findall(r"members: \[(.*)\]", page):
        listed |= dict.fromkeys(names.split(", "), "stampede.optim.optimizers")
    module = importlib.import_module(package)
    for name in module.__all__:
        home = importlib.import_module(listed[name])
        assert getattr(home, name) is getattr(module, name), name


@pytest.mark.parametrize(
    "text, found",
    [
        ('<script src="https://x.y/z.js">', True),
        ("<link rel=stylesheet href='//x.y/z.css'>", True),
        ('<img alt="" src=http://x.y/z.png>', True),
        ("<style>body{background:url(//x.y/z.png)}</style>", True),
        ('@import "https://x.y/z.css";', True),
        ('<a title="x" href="https://x.y">', False),
        ('<script src="assets/x.js">', False),
        ("""a{b:url("data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>")}""", False),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_seen(text, found):
    assert bool(script("hooks").loaded_from_elsewhere(text)) == found


def test_nothing_of_the_search_is_from_elsewhere():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"search", "offline"} <= set(map(str, site["plugins"]))
    # The plugin takes a script from elsewhere unless it finds one of this name.
    (stand_in,) = site["extra"]["polyfills"]
    assert "iframe-worker" in stand_in and (ROOT / "docs" / stand_in).is_file()


def test_a_page_that_was_opened_as_a_file_can_be_searched(tmp_path):
    node = shutil.which("node")
    material = importlib.util.find_spec("material")
    if node is None or material is None:
        pytest.skip("node and mkdocs-material are needed")
    templates = Path(material.origin).parent / "templates"
    (worker,) = templates.glob("assets/javascripts/workers/search.*.min.js")
    page = {"title": "Sharding", "text": "a table that is resharded"}
    index = {
        "config": {"lang": ["en"], "separator": "[\\s]+", "pipeline": ["stopWordFilter"],
                   "fields": {"title": {"boost": 10.0}, "text": {"boost": 1.0}}},
        "docs": [{"location": "a.html", **page}, {"location": "b.html", "title": "B", "text": ""}],
        "options": {"suggest": False},
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    files = [ROOT / "docs/javascripts/iframe-worker.js", worker, tmp_path / "index.json"]
    program = ROOT / "tests/support/search_from_file.js"
    done = subprocess.run(
        [node, program, *files, "resharded"], capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout == '["a.html"]\n', done.stderr
