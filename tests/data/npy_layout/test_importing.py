"""What is imported, against TorchRec's own readers and numpy."""

import numpy as np
import pytest

from stampede.data.npy_layout import import_npy
from stampede.data.npy_layout.arrays import BLOCK_ROWS
from support.npy_files import check_part, write_npy
from support.prepared_arrays import arrays_of, manifest_of


def test_what_torchrec_writes_is_imported(tmp_path, criteo):
    folder = tmp_path / "npy"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for day in range(3):
        lines = []
        for _ in range(25):
            numbers = ["" if draw.random() < 0.2 else str(draw.integers(0, 99)) for _ in range(13)]
            ids = ["" if draw.random() < 0.2 else f"{draw.integers(0, 2**32):x}" for _ in range(26)]
            lines.append("\t".join([str(draw.integers(0, 2)), *numbers, *ids]) + "\n")
        (tmp_path / "day.tsv").write_text("".join(lines))
        files = [folder / f"day_{day}_{name}.npy" for name in ("dense", "sparse", "labels")]
        criteo.BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day.tsv"), *map(str, files))
    written = [
        {name: np.load(folder / f"day_{day}_{name}.npy") for name in ("dense", "sparse", "labels")}
        for day in range(3)
    ]
    assert written[0]["sparse"].max() > 2**31
    import_npy(folder, tmp_path / "raw")
    manifest = manifest_of(tmp_path / "raw")
    assert manifest["ids_dtype"] == "int64"
    largest = np.max([arrays["sparse"].max(axis=0) for arrays in written], axis=0)
    assert [field["rows"] for field in manifest["fields"]] == (largest + 1).tolist()
    assert [field["name"] for field in manifest["fields"]] == [f"C{i}" for i in range(1, 27)]
    assert manifest["numbers"] == [f"I{i}" for i in range(1, 14)]
    check_part(tmp_path / "raw", "train", written[:2])

    # As its readers do with `hashes`.
    import_npy(folder, tmp_path / "hashed", sizes=[1000], modulo=True)
    assert manifest_of(tmp_path / "hashed")["ids_dtype"] == "int32"
    found, _ = arrays_of(tmp_path / "hashed", "train")
    pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
        stage="train",
        **{
            f"{name}_paths": [str(folder / f"day_{day}_{name}.npy") for day in range(2)]
            for name in ("dense", "sparse", "labels")
        },
        batch_size=50,
        rank=0,
        world_size=1,
        hashes=[1000] * 26,
    )
    (batch,) = list(pipe)
    ids = batch.sparse_features.values().reshape(26, 50).T
    np.testing.assert_array_equal(found["ids"], ids)


@pytest.mark.parametrize("rows", [20, 21])
def test_the_last_day_is_halved_as_torchrec_does(tmp_path, criteo, rows):
    folder = tmp_path / "npy"
    # Day 10 is after day 9.
    days = [write_npy(folder, f"day_{day}", 10 + day, 26, 13, seed=day) for day in (8, 9)]
    last = write_npy(folder, "day_10", rows, 26, 13, seed=10)
    import_npy(folder, tmp_path / "out")
    check_part(tmp_path / "out", "train", days)
    for stage, part in (("val", "validation"), ("test", "test")):
        pipe = criteo.InMemoryBinaryCriteoIterDataPipe(
            stage=stage,
            dense_paths=[str(folder / "day_10_dense.npy")],
            sparse_paths=[str(folder / "day_10_sparse.npy")],
            labels_paths=[str(folder / "day_10_labels.npy")],
            batch_size=100,
            rank=0,
            world_size=1,
            hashes=[40] * 26,
        )
        (batch,) = list(pipe)
        count = len(batch.labels)
        read = {
            "dense": batch.dense_features.numpy(),
            "sparse": batch.sparse_features.values().reshape(26, count).T.numpy(),
            "labels": batch.labels.numpy(),
        }
        check_part(tmp_path / "out", part, [read])
    check_part(tmp_path / "out", "validation", [{k: v[: -(-rows // 2)] for k, v in last.items()}])


def test_contiguous_ids_of_torchrec(tmp_path, criteo):
    folder, raw = tmp_path / "npy", tmp_path / "raw"
    days = {f"day_{day}": write_npy(folder, f"day_{day}", 30, 26, 13, seed=day) for day in (0, 1)}
    raw.mkdir()
    for name in days:
        (folder / f"{name}_sparse.npy").rename(raw / f"{name}_sparse.npy")
    files = [str(raw / f"{name}_sparse.npy") for name in days]
    criteo.BinaryCriteoUtils.sparse_to_contiguous(files, str(folder), frequency_threshold=3)
    import_npy(folder, tmp_path / "out")
    found, _ = arrays_of(tmp_path / "out", "train")
    np.testing.assert_array_equal(found["ids"], np.load(folder / "day_0_sparse_contig_freq.npy"))
    # TorchRec gives rare ids row 1.
    assert {field["unseen_row"] for field in manifest_of(tmp_path / "out")["fields"]} == {1}


def test_several_files_of_a_part_and_more_rows_than_a_block(tmp_path):
    folder = tmp_path / "npy"
    train = [write_npy(folder, f"train_{i}", rows, seed=i) for i, rows in ((2, 5), (10, 7))]
    rows = BLOCK_ROWS + 3
    train.append(write_npy(folder, "train_11", rows, seed=5, labels=np.arange(rows) % 2))
    test = [write_npy(folder, "test", 9, ids=np.int64)]
    import_npy(folder, tmp_path / "out")
    check_part(tmp_path / "out", "train", train)
    check_part(tmp_path / "out", "test", test)
    manifest = manifest_of(tmp_path / "out")
    assert [shard["rows"] for shard in manifest["parts"]["train"]] == [5, 7, rows]
    assert [field["rows"] for field in manifest["fields"]] == [40] * 3
    assert manifest["ids_dtype"] == "int32"


def test_links_save_the_copy(tmp_path):
    folder = tmp_path / "npy"
    train, test = (write_npy(folder, name, 20, seed=i) for i, name in enumerate(("train", "test")))
    np.save(folder / "test_dense.npy", test["dense"].astype(np.float64))
    import_npy(folder, tmp_path / "out", link=True)
    linked = {path.name for path in (tmp_path / "out").iterdir() if path.stat().st_nlink > 1}
    # The others need another type.
    assert linked == {"train-00000-ids.npy", "train-00000-numbers.npy", "test-00000-ids.npy"}
    check_part(tmp_path / "out", "train", [train])
    check_part(tmp_path / "out", "test", [test])
    import_npy(folder, tmp_path / "copied")
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "copied").iterdir())


def test_given_sizes(tmp_path):
    folder = tmp_path / "npy"
    for name in ("train", "val", "test"):
        write_npy(folder, name, 20)
    import_npy(folder, tmp_path / "out", sizes=[40, 50, 60])
    fields = manifest_of(tmp_path / "out")["fields"]
    assert [field["rows"] for field in fields] == [40, 50, 60]
