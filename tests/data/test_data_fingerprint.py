"""What tells one dataset from another without reading its data."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import Subset

from loopline.data import fingerprint_of_files
from loopline.data.fingerprint import fingerprint_of


@pytest.fixture
def folder(tmp_path):
    return files(tmp_path / "data", {"a.txt": "one", "b.txt": "three", "c/a.txt": ""})


def files(folder, texts):
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def paths(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_fingerprint_of_files_is_the_same_for_ever(folder):
    assert fingerprint_of_files(paths(folder)) == "3 files, d8790c2ecd72bb45"


def test_the_order_of_the_files_does_not_count(folder):
    assert fingerprint_of_files(sorted(paths(folder))) == fingerprint_of_files(sorted(paths(folder), reverse=True))


def test_files_may_be_moved_together(folder, tmp_path):
    before = fingerprint_of_files(paths(folder))
    assert fingerprint_of_files(paths(folder.rename(tmp_path / "elsewhere"))) == before


def test_what_is_in_the_files_is_not_read(folder):
    before = fingerprint_of_files(paths(folder))
    (folder / "a.txt").write_text("eno")
    (folder / "b.txt").chmod(0)
    assert fingerprint_of_files(paths(folder)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "a.txt").write_text("four"),
        lambda folder: (folder / "a.txt").rename(folder / "d.txt"),
        lambda folder: (folder / "a.txt").unlink(),
        lambda folder: (folder / "d.txt").write_text("new"),
        lambda folder: (folder / "c" / "a.txt").rename(folder / "c" / "b.txt"),
    ],
    ids=["another size", "another name", "one less", "one more", "another name below"],
)
def test_other_files_have_another_fingerprint(folder, change):
    before = fingerprint_of_files(paths(folder))
    change(folder)
    assert fingerprint_of_files(paths(folder)) != before


def test_no_files_have_a_fingerprint_too():
    assert fingerprint_of_files([]).startswith("0 files, ")


def test_a_file_that_is_missing_is_an_error():
    with pytest.raises(FileNotFoundError):
        fingerprint_of_files([Path("nowhere/nothing")])


class Method:
    def fingerprint(self):
        return 17


class Attribute:
    fingerprint = "v2"


@pytest.mark.parametrize(("dataset", "said"), [(Method(), "17"), (Attribute(), "v2"), ([1, 2], None)])
def test_a_dataset_is_asked_what_it_says_of_itself(dataset, said):
    assert fingerprint_of(dataset) == said


def test_a_subset_tells_which_samples_it_has_and_of_what():
    told = {
        fingerprint_of(Subset(dataset, indices)) for dataset in (Method(), Attribute()) for indices in ([1, 2], [2, 1])
    }
    assert len(told) == 4
