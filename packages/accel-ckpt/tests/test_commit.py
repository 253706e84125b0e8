"""Saving into directories that exist, leftovers, and several savers."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading

import pytest
import torch
from torch import nn

from accel_ckpt import load_checkpoint, remove_checkpoint, save_checkpoint, verify_checkpoint
from accel_ckpt.commit import finish_journal, open_staging
from accel_ckpt.owner import Alive, claim, take_over
from accel_state.errors import CheckpointCorruptError, CheckpointError
from accel_testkit.faults import count_calls, failing_at, killed_at, watching


def filled(value: float) -> nn.Module:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, value)
    return net


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def loaded(directory) -> float:
    net = filled(-1)
    load_checkpoint(directory, {"net": net})
    return net.weight[0, 0].item()


def test_an_existing_directory_is_replaced_and_the_users_files_stay(tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "sub").mkdir()
    (target / "sub" / "deep.txt").write_text("mine")
    save_checkpoint(target, {"net": filled(1), "second": filled(2)})
    assert "model_1.safetensors" in names(target)
    save_checkpoint(target, {"net": filled(3)}, before_commit=lambda path: (path / "extra.txt").write_text("x"))
    assert loaded(target) == 3
    assert names(target) == [
        "extra.txt",
        "manifest.json",
        "model.safetensors",
        "notes.txt",
        "random_states_0.json",
        "state.json",
        "sub",
    ]
    save_checkpoint(target, {"net": filled(4)})
    assert "extra.txt" not in names(target)
    assert (target / "notes.txt").read_text() == (target / "sub" / "deep.txt").read_text() == "mine"
    assert names(tmp_path) == ["c"]


def test_an_old_file_that_the_user_changed_stays(tmp_path):
    save_checkpoint(tmp_path / "c", {"net": filled(1), "second": filled(2)})
    (tmp_path / "c" / "model_1.safetensors").write_text("mine now")
    save_checkpoint(tmp_path / "c", {"net": filled(3)})
    assert (tmp_path / "c" / "model_1.safetensors").read_text() == "mine now"


def test_something_in_the_way_of_a_file_is_said_before_the_commit(tmp_path):
    save_checkpoint(tmp_path / "c", {"net": filled(1)})
    (tmp_path / "c" / "model_1.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model_1\.safetensors is a directory where the checkpoint has a file"):
        save_checkpoint(tmp_path / "c", {"net": filled(2), "second": filled(3)})
    (tmp_path / "c" / "sub").write_text("mine")

    def hook(path) -> None:
        (path / "sub").mkdir()
        (path / "sub" / "x").write_text("")

    with pytest.raises(CheckpointError, match="sub is a file where the checkpoint has a directory"):
        save_checkpoint(tmp_path / "c", {"net": filled(2)}, before_commit=hook)
    assert loaded(tmp_path / "c") == 1


def interrupted(target, value: float) -> None:
    """Replace a checkpoint and die in the middle of putting the files in place."""

    def save() -> None:
        save_checkpoint(target, {"net": filled(value)})

    first_replace = count_calls(save).index("replace")
    save_checkpoint(target, {"net": filled(0)})
    assert killed_at(first_replace + 1, save)


def test_a_replacement_that_died_is_read_and_completed(tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    interrupted(target, 5)
    assert (target / ".accel-journal" / "manifest.json").is_file()
    assert loaded(target) == 5
    verify_checkpoint(target)
    save_checkpoint(target, {"net": filled(6)})
    assert loaded(target) == 6
    assert not (target / ".accel-journal").exists()


def test_a_replacement_that_died_can_be_removed(tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    interrupted(target, 5)
    remove_checkpoint(target)
    assert not target.exists()


def test_a_reader_that_meets_a_replacement_reads_the_new_set(tmp_path, monkeypatch):
    import accel_ckpt.loading as module

    target = tmp_path / "c"
    save_checkpoint(target, {"net": filled(1)})
    original, done = module.read_manifest, []

    def read_then_replace(path):
        manifest = original(path)
        if not done:
            done.append(True)
            save_checkpoint(target, {"net": filled(2), "more": filled(3)})
        return manifest

    monkeypatch.setattr(module, "read_manifest", read_then_replace)
    assert loaded(target) == 2


def test_a_reader_whose_files_move_reads_on(tmp_path, monkeypatch):
    """Each file of a replacement moves into place just before the reader opens it."""
    import accel_ckpt.loading as module

    target = tmp_path / "c"
    target.mkdir()
    interrupted(target, 5)
    original, one_at_a_time = module.hash_file, threading.Lock()

    def move_then_hash(path):
        with one_at_a_time:  # files are verified by several threads
            finish_journal(target)
        return original(path)

    monkeypatch.setattr(module, "hash_file", move_then_hash)
    assert loaded(target) == 5


def test_a_damaged_replacement_is_said_to_be_damaged(tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    interrupted(target, 5)
    (target / ".accel-journal" / "state.json").write_text("{}")
    with pytest.raises(CheckpointCorruptError, match=r"state\.json has 2 bytes"):
        loaded(target)


def test_leftovers_of_the_dead_are_removed_and_nothing_else(tmp_path):
    def save() -> None:
        save_checkpoint(tmp_path / "c", {"net": filled(1)})

    rename = count_calls(save).index("rename")
    remove_checkpoint(tmp_path / "c")
    assert killed_at(rename, save)
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".c.accel-staging-")
    mine = tmp_path / ".mine.accel-staging-0123456789abcdef"  # looks like ours, but no one of ours owns it
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (tmp_path / ".c.accel-staging-short").mkdir()
    (tmp_path / ".d.accel-staging-0123456789abcdef").write_text("a file")
    save_checkpoint(tmp_path / "other", {"net": filled(2)})
    assert names(tmp_path) == [
        ".c.accel-staging-short",
        ".d.accel-staging-0123456789abcdef",
        ".mine.accel-staging-0123456789abcdef",
        "other",
    ]
    assert (mine / "notes.txt").read_text() == "mine"


def test_an_interrupted_removal_is_completed_by_the_next_save(tmp_path):
    save_checkpoint(tmp_path / "a", {"net": filled(1)})

    def remove() -> None:
        remove_checkpoint(tmp_path / "a")

    assert killed_at(2, remove)
    (trash,) = names(tmp_path)
    assert trash.startswith(".a.accel-trash-")
    save_checkpoint(tmp_path / "b", {"net": filled(2)})
    assert names(tmp_path) == ["b"]


def test_a_leftover_that_cannot_be_removed_is_named(tmp_path):
    def save() -> None:
        save_checkpoint(tmp_path / "c", {"net": filled(1)})

    rename = count_calls(save).index("rename")
    remove_checkpoint(tmp_path / "c")
    assert killed_at(rename, save)
    with failing_at(0, 13), pytest.warns(RuntimeWarning, match=r"cannot remove .*accel-staging"):
        from accel_ckpt.commit import remove_leftovers

        assert remove_leftovers(tmp_path) == []


def test_a_live_saver_is_not_disturbed(tmp_path):
    staging = open_staging(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on .* is saving to .*c right now"):
        save_checkpoint(tmp_path / "c", {"net": filled(1)})
    save_checkpoint(tmp_path / "d", {"net": filled(2)})
    assert staging.path.is_dir()
    staging.claim.release()
    save_checkpoint(tmp_path / "c", {"net": filled(3)})
    assert names(tmp_path) == ["c", "d"]


def test_a_live_replacement_is_not_disturbed(tmp_path):
    target = tmp_path / "c"
    target.mkdir()
    interrupted(target, 5)
    owner = take_over(target / ".accel-journal")
    with pytest.raises(CheckpointError, match=r"is saving to .* right now"):
        save_checkpoint(target, {"net": filled(1)})
    owner.release()
    save_checkpoint(target, {"net": filled(1)})
    assert loaded(target) == 1


def test_a_save_that_commits_at_any_moment_of_another_keeps_its_files(tmp_path):
    """Two that began before either could see the other; the second commits at each call of the first one's end."""
    save_checkpoint(tmp_path / "source", {"net": filled(3)})

    def run(moment: int | None) -> tuple[list[str], bool]:
        target, aside = tmp_path / f"c{moment}", tmp_path / f"aside{moment}"
        save_checkpoint(target, {"net": filled(1)})
        second = open_staging(target)
        for file in (tmp_path / "source").iterdir():
            shutil.copy(file, second.path)
        second.path.rename(aside)  # out of the first one's sight
        has_committed = False

        def commit_second(number: int, _name: str) -> None:
            nonlocal has_committed
            if number == moment:
                with contextlib.suppress(OSError):  # the first one's journal is still there: then it is refused
                    aside.rename(target / ".accel-journal")
                    has_committed = True

        with watching(commit_second) as trace:
            save_checkpoint(target, {"net": filled(2)})
        second.claim.release()
        assert loaded(target) == (3 if has_committed else 2)
        save_checkpoint(target, {"net": filled(4)})  # which finishes what the second one has begun
        assert names(target) == ["manifest.json", "model.safetensors", "random_states_0.json", "state.json"]
        return trace.calls, has_committed

    calls, _ = run(None)
    after = range(calls.index("rename") + 1, len(calls))
    committed = [run(moment)[1] for moment in after]
    assert any(committed)


def test_who_comes_second_is_told_and_changes_nothing(tmp_path):
    def meanwhile(path) -> None:
        path.rename(tmp_path / "aside")  # so that the other saver does not see this one
        save_checkpoint(tmp_path / "c", {"net": filled(1)})
        (tmp_path / "aside").rename(path)

    with pytest.raises(CheckpointError, match="was written by another process while this one was saving"):
        save_checkpoint(tmp_path / "c", {"net": filled(2)}, before_commit=meanwhile)
    assert loaded(tmp_path / "c") == 1
    assert names(tmp_path) == ["c"]


def test_a_claim_ends_with_its_descriptor(tmp_path):
    mine = claim(tmp_path)
    with pytest.raises(Alive) as alive:
        take_over(tmp_path)
    assert alive.value.certain
    mine.release()
    mine.release()
    take_over(tmp_path).release()
    (tmp_path / ".accel-owner").unlink()
    assert take_over(tmp_path) is None


def test_without_locks_the_process_id_decides(tmp_path, monkeypatch):
    import fcntl

    def unsupported(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    claim(tmp_path).release()
    with pytest.raises(Alive) as alive:
        take_over(tmp_path)
    assert not alive.value.certain
    owner = tmp_path / ".accel-owner"
    owner.write_text(owner.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305'))  # beyond the largest id
    take_over(tmp_path).release()
    for text in ('{"host": "elsewhere", "pid": 4194305}', "noise"):
        owner.write_text(text)
        with pytest.raises(Alive):
            take_over(tmp_path)


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_after_the_commit_says_that_it_is_in_force(tmp_path, existing):
    target = tmp_path / "c"

    def save(value: float = 2) -> None:
        save_checkpoint(target, {"net": filled(value)})

    def set_up() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if existing:
            save(1)

    set_up()
    calls = count_calls(save)
    for number in range(calls.index("rename") + 1, len(calls)):
        set_up()
        with failing_at(number, 5), pytest.raises(CheckpointError, match="is in force and can be loaded"):
            save()
        assert loaded(target) == 2
        save(3)
        assert loaded(target) == 3
        assert [name for name in names(target) + names(tmp_path) if name.startswith(".")] == []


def test_new_parents_are_made(tmp_path):
    save_checkpoint(tmp_path / "a" / "b" / "c", {"net": torch.nn.Linear(1, 1)})
    verify_checkpoint(tmp_path / "a" / "b" / "c")
