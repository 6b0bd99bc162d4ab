"""Series of checkpoints: which files belong together, which go, which is the newest whole one."""

import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from ddpkit.checkpoint import latest_checkpoint, rank0_save
from ddpkit.errors import CheckpointError, ConfigError
from ddpkit.series import Numbered, is_whole, numbered, older_members


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("epoch-3.pt", Numbered("epoch-", 3, ".pt")),
        ("run2-step0300.pt", Numbered("run2-step", 300, ".pt")),
        ("3", Numbered("", 3, "")),
        ("7.pt", Numbered("", 7, ".pt")),
        ("step.300", Numbered("step.", 300, "")),
        ("a1b.pt2", Numbered("a", 1, "b.pt2")),
        ("1.5.pt", Numbered("1.", 5, ".pt")),
        ("last.pt", None),
        ("last.pt2", None),
        ("", None),
        ("٣.pt", None),
    ],
)
def test_the_last_digits_of_a_name_are_its_number(name: str, expected: Numbered | None) -> None:
    assert numbered(name) == expected


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_oldest_go_and_nothing_else(tmp_path: Path) -> None:
    others = ["epoch-1.txt", "other-1.pt", "epoch-x.pt", "xepoch-1.pt", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "epoch-0.pt").mkdir()
    for epoch in range(1, 12):
        rank0_save({"epoch": epoch}, tmp_path / f"epoch-{epoch}.pt", keep_last=3)
        kept = [f"epoch-{e}.pt" for e in range(max(1, epoch - 2), epoch + 1)]
        assert names(tmp_path) == sorted([*others, "epoch-0.pt", *kept])


def test_the_one_just_saved_stays_whatever_higher_numbers_there_are(tmp_path: Path) -> None:
    for epoch in (3, 8, 9, 4, 5):
        rank0_save({"epoch": epoch}, tmp_path / f"e{epoch}.pt", keep_last=2)
    assert names(tmp_path) == ["e4.pt", "e5.pt", "e8.pt", "e9.pt"]
    assert older_members(tmp_path / "e9.pt", 1) == [tmp_path / f"e{e}.pt" for e in (8, 5, 4)]


def test_nothing_goes_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    rank0_save({}, tmp_path / "e1.pt")
    rank0_save({}, tmp_path / "e2.pt")
    (tmp_path / "e3.pt").mkdir()
    with pytest.raises(CheckpointError):
        rank0_save({}, tmp_path / "e3.pt", keep_last=1)
    assert names(tmp_path) == ["e1.pt", "e2.pt", "e3.pt"]


@pytest.mark.parametrize("background", [False, True])
def test_older_ones_that_cannot_be_removed_leave_the_save_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    background: bool,
) -> None:
    def refuse(path: Path, keep: int) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(path.parent))

    monkeypatch.setattr("ddpkit.checkpoint.older_members", refuse)
    rank0_save({"n": 1}, tmp_path / "e1.pt", keep_last=1, background=background).wait()
    assert torch.load(tmp_path / "e1.pt") == {"n": 1}
    assert "Permission denied" in caplog.text


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [("last.pt", 2, "epoch-"), ("e1.pt", 0, "at least 1"), ("e1.pt", True, "at least 1")],
)
def test_what_is_no_series_is_refused(tmp_path: Path, name: str, keep: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank0_save({}, tmp_path / name, keep_last=keep)
    assert names(tmp_path) == []


# ----------------------------------------------------------------------------- the newest whole one


def save_series(folder: Path) -> list[Path]:
    files = [folder / f"e{number}.pt" for number in (2, 9, 10)]
    for number, file in enumerate(files):
        rank0_save({"x": torch.full((1000,), number)}, file)
    return files


def test_the_highest_number_wins_and_names_are_no_numbers(tmp_path: Path) -> None:
    files = save_series(tmp_path)
    os.utime(files[0])
    (tmp_path / ".ddpkit-0123.tmp").write_bytes(b"")
    torch.save({}, tmp_path / "zz.pt")
    torch.save({}, tmp_path / "e99.other")
    assert latest_checkpoint(tmp_path) == files[2]
    assert latest_checkpoint(str(tmp_path), "e?.pt") == files[1]
    assert latest_checkpoint(tmp_path, "z*.pt") == tmp_path / "zz.pt"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


@pytest.mark.parametrize("how", ["empty", "text", "half", "no data"])
def test_damaged_ones_are_skipped_with_a_warning(tmp_path: Path, how: str) -> None:
    *_, older, newest = save_series(tmp_path)
    damage(newest, how)
    with pytest.warns(UserWarning, match=r"e10\.pt is damaged"):
        assert latest_checkpoint(tmp_path) == older
    damage(older, "half")
    damage(tmp_path / "e2.pt", "half")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latest_checkpoint(tmp_path) is None


def damage(file: Path, how: str) -> None:
    whole = file.read_bytes()
    if how == "no data":
        import zipfile

        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/version", "3")
        return
    file.write_bytes({"empty": b"", "text": b"hello", "half": whole[: len(whole) // 2]}[how])


def test_a_file_cut_anywhere_is_not_whole(tmp_path: Path) -> None:
    file = save_series(tmp_path)[0]
    contents = file.read_bytes()
    assert is_whole(file)
    for length in range(0, len(contents), 97):
        file.write_bytes(contents[:length])
        assert not is_whole(file), length


def test_flipped_bits_are_found_where_checksums_are_computed(tmp_path: Path) -> None:
    file = save_series(tmp_path)[0]
    contents = bytearray(file.read_bytes())
    state = torch.load(file)
    generator = random.Random(0)
    for _ in range(60):
        flipped = bytearray(contents)
        flipped[generator.randrange(len(contents))] ^= 1 << generator.randrange(8)
        file.write_bytes(flipped)
        # What is no part of a checksum is padding, or makes no difference to what is loaded.
        assert not is_whole(file, verify=True) or torch.equal(torch.load(file)["x"], state["x"])


def test_what_torch_has_saved_counts_too(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "e1.pt")
    assert latest_checkpoint(tmp_path, verify=True) == tmp_path / "e1.pt"
