"""The commands of the README and the manual run, block by block, on small data of the same form."""

import gzip
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_manual import PAGES

from stampede.engine.cli import main, stampede
from support.paths import ROOT
from support.waiting import HANG

# What a reader has done before, by page.
BEFORE = {
    "checkpoints.md": [
        "python launch.py configs/table.yaml data.path=clicks.csv data.schema_file=schema.yaml "
        "run.name=october"
    ],
    "experiments.md": [
        "python launch.py configs/quickstart.yaml",
        "python launch.py configs/quickstart.yaml run.name=criteo-1024",
        "python launch.py configs/quickstart.yaml run.name=criteo-8192",
    ],
    "predict-export.md": [
        "python launch.py configs/criteo_kaggle.yaml data.path=train.txt",
        "python launch.py configs/table.yaml 'data.path=log/*.csv.gz' data.schema_file=shop.yaml "
        "run.name=shop",
    ],
}
# What other tests run: make's targets are checked by name, a sweep takes minutes.
ELSEWHERE = ("make ", ". .venv", "stampede sweep")
SMALL = ("model.hidden=[16,16]", "evaluate.compare_with_lr=false")
FEW_CLICKS = ("data.rows=2000", "data.test_rows=500", "data.scale=0.0005", "train.batch_size=256")


def blocks(page):
    """Commands, in the blocks that a reader would copy."""
    for block in re.findall(r"^```\n(.*?)^```$", PAGES[page], flags=re.S | re.M):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line for line in lines if re.match(r"(python|torchrun|stampede|cd) ", line))


def write_criteo(path, rows, seed=0):
    draw = random.Random(seed)
    lines = [
        [draw.randrange(2), *(draw.randrange(50) for _ in range(13))]
        + [f"{draw.randrange(20):08x}" for _ in range(26)]
        for _ in range(rows)
    ]
    text = "".join("\t".join(map(str, line)) + "\n" for line in lines)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_table(path, header, separator, row, rows=300):
    path.parent.mkdir(exist_ok=True)
    draw = random.Random(0)
    lines = [separator.join(map(str, row(draw, at))) for at in range(rows)]
    text = "".join(f"{line}\n" for line in ([header] if header else []) + lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_avazu(path):
    names = (
        "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
        "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
        + ",".join(f"C{number}" for number in range(14, 22))
    )
    write_table(path, names, ",", lambda draw, at: [
        at, draw.randrange(2), 14102100 + at // 20 % 24, *(draw.randrange(9) for _ in range(21)),
    ])  # fmt: skip


def write_clicks(path):
    write_table(path, "clicked,user,item,genres,price,when", ",", lambda draw, at: [
        draw.randrange(2), f"u{draw.randrange(9)}", draw.randrange(9), "a|b",
        draw.random(), f"2024-01-{1 + at // 15:02d} 10:00:00",
    ])  # fmt: skip


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with every file that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("train.txt", "new/a.tsv.gz"):
        write_criteo(tmp_path / name, 400)
    write_avazu(tmp_path / "train.csv")
    for name in ("clicks.csv", "november.csv"):
        write_clicks(tmp_path / name)
    write_table(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", ",", lambda draw, at: [
        draw.randrange(30), draw.randrange(9), draw.randrange(1, 6), 1_000_000_000 + at * 7200,
    ])  # fmt: skip
    write_table(tmp_path / "log/march.csv.gz", "", ";", lambda draw, at: [
        draw.randrange(2), draw.randrange(9), draw.randrange(9), "a|b", draw.random(), "x",
        draw.randrange(20), "2024-02-01" if at < 200 else "2024-03-02", 1,
    ])  # fmt: skip
    for text in PAGES.values():
        for schema in re.findall(r"```yaml\n(.*?)```", text, flags=re.S):
            named = re.match(r"# (\w+\.yaml)\n", schema)
            if named or schema.startswith("label"):
                (tmp_path / (named[1] if named else "schema.yaml")).write_text(schema)
    return tmp_path


def run_command(line):
    """Its exit status."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["stampede", "synthetic"]:
        if "--files" not in words:
            shutil.rmtree("logs")
        words += ["--rows", "400", "--scale", "0.0005"]
    if words[:2] == ["stampede", "incremental"]:
        words += SMALL
    if words[0] == "stampede":
        return stampede(words[1:])
    if "launch.py" not in words:
        # The package that was exported needs no more than its libraries.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        command = line.partition("  #")[0]
        return subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, timeout=HANG, check=False
        ).returncode
    arguments = words[words.index("launch.py") + 1 :]
    if "--plan" in arguments:
        return main(arguments)
    arguments += SMALL
    if "configs/quickstart.yaml" in arguments:
        arguments += FEW_CLICKS
    elif any(argument.startswith("train.batch_size") for argument in arguments):
        arguments.append("train.batch_size=64")
    if not any(argument.startswith("train.epochs") for argument in arguments):
        arguments.append("train.epochs=1")
    if "checkpoint.resume=auto" not in arguments:
        arguments.append("run.overwrite=true")
    return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))])
def test_commands_of_a_page_run(page, desk):
    for day in range(1, 8 if page == "incremental.md" else 2):
        write_criteo(desk / f"logs/day_{day}.tsv", 400, seed=day)
    for line in [*BEFORE.get(page, []), *blocks(page)]:
        if not line.startswith(ELSEWHERE):
            assert run_command(line) == 0, line
