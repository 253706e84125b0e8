"""From a staging directory to a checkpoint, at one instant.

A new directory is a hidden sibling that is renamed into place. Into a directory that exists already, the staged files
come as a journal: `<directory>/.accel-journal`, also made by one rename. From then on accel reads the new set, wherever
each file lies; moving them into place is redone by the next save if this process dies meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_state import warn_user
from accel_state.errors import CheckpointError

from .durable import flush_directory, make_directories, os_reason
from .manifest import Manifest, read_manifest
from .names import JOURNAL_NAME, MANIFEST_NAME, OWNER_NAME, STAGING_MARK, TRASH_MARK
from .owner import Alive, Claim, claim, describe_owner, take_over

_STAGING = re.compile(rf"\..+{re.escape(STAGING_MARK)}[0-9a-f]{{16}}")
_REMOVAL_ATTEMPTS = 5
_TRASH = re.compile(rf"\..+{re.escape(TRASH_MARK)}[0-9a-f]{{16}}")


@dataclass(frozen=True)
class Staging:
    """A directory being filled.

    Args:
        target: the real path that it will become, or whose files it will replace.
        path: where it is filled.
        replaces: the target existed when the save began.
        claim: tells other savers that this one is alive.
    """

    target: Path
    path: Path
    replaces: bool
    claim: Claim


def real_directory(directory: str | os.PathLike[str]) -> Path:
    """The directory behind links, which may not exist yet.

    Raises:
        CheckpointError: no path at all; the empty one would be the working directory.
    """
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise CheckpointError(f"{directory!r} is not a directory's path: name one, such as 'run/checkpoint'.")
    return Path(os.path.realpath(directory))


def open_staging(target: Path) -> Staging:
    """Begin a save: remove what dead ones left, finish what they had committed, make a directory to fill.

    Raises:
        CheckpointError: another live process is saving to the same place, or the target is a file.
        OSError: as the system reports it.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a directory. Choose another path.")
    replaces = target.is_dir()
    home = target if replaces else target.parent
    make_directories(home)
    if replaces:
        finish_journal(target)
        _unlink(target / OWNER_NAME)  # left if its save died between the commit and this
    prefix = f".{target.name}{STAGING_MARK}"
    path, owned = _make_staging(home, prefix)
    staging = Staging(target=target, path=path, replaces=replaces, claim=owned)
    try:  # only now: of two that begin at once, at least one sees the other
        for other in remove_leftovers(home, own=path):
            if other.name.startswith(prefix):
                raise CheckpointError(
                    f"{describe_owner(other)} is saving to {target} right now. Give each run its own directory, or "
                    "wait."
                )
    except BaseException:
        discard(staging)
        raise
    return staging


def stage_beside(target: Path) -> Staging:
    """Begin to write one file, which may be there; others may write it at the same time, and the last one wins."""
    remove_leftovers(target.parent)
    path, owned = _make_staging(target.parent, f".{target.name}{STAGING_MARK}")
    return Staging(target=target, path=path, replaces=True, claim=owned)


def _make_staging(home: Path, prefix: str) -> tuple[Path, Claim]:
    while True:
        path = home / f"{prefix}{secrets.token_hex(8)}"
        os.mkdir(path)  # noqa: PTH102 - one system call
        try:
            return path, claim(path)
        except FileNotFoundError:
            continue  # taken for an empty leftover: make another
        except OSError:
            _unlink(path / OWNER_NAME)
            _rmdir_if_empty(path)
            raise


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A directory to fill that becomes `target` at the end of the block, or is thrown away with whatever ends it.

    Raises:
        CheckpointError: as `open_staging` and `commit`, or the system cannot write; says why.
    """
    staging = open_staging(target)
    try:
        yield staging.path
        commit(staging, [])
    except OSError as error:
        discard(staging)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot write {target}: {os_reason(error)}") from error
    except BaseException:
        discard(staging)
        raise


def commit(staging: Staging, files: Collection[str]) -> None:
    """Make the staged checkpoint the one in force. Its files and its manifest are on the disk already.

    Raises:
        CheckpointError: someone else made the target meanwhile, or something is in the way of a file.
        OSError: as the system reports it.
    """
    for directory in [path for path, _, _ in os.walk(staging.path)]:
        flush_directory(Path(directory))
    destination = staging.target / JOURNAL_NAME if staging.replaces else staging.target
    if staging.replaces:
        _check_nothing_in_the_way(staging.target, files)
    try:
        os.rename(staging.path, destination)  # noqa: PTH104 - the instant of the commit
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CheckpointError(
                f"{staging.target} was written by another process while this one was saving to it; nothing of it was "
                "changed. Give each run its own directory."
            ) from error
        raise
    try:
        flush_directory(destination.parent)
        if staging.replaces:
            _move_into_place(staging.target, staging.claim)
        else:
            _unlink(staging.target / OWNER_NAME)
            staging.claim.release()
    except OSError as error:
        raise CheckpointError(
            f"the new checkpoint in {staging.target} is in force and can be loaded, but finishing it stopped: "
            f"{os_reason(error)}. It may not outlive a power cut; the next save completes the rest."
        ) from error


def discard(staging: Staging) -> None:
    """Give a save up and remove what it staged. What cannot be removed now is removed by the next save."""
    with contextlib.suppress(OSError):  # the reason for giving up is being raised, and matters more
        _remove_staging(staging.path, staging.claim)
    staging.claim.release()


def _check_nothing_in_the_way(target: Path, files: Collection[str]) -> None:
    for name in (*files, MANIFEST_NAME):
        path = target / name
        if path.is_dir() and not path.is_symlink():
            raise CheckpointError(f"{path} is a directory where the checkpoint has a file; move it or save elsewhere.")
        for parent in path.relative_to(target).parents[:-1]:
            inner = target / parent
            if inner.is_symlink() or (inner.exists() and not inner.is_dir()):
                kind = "symbolic link" if inner.is_symlink() else "file"
                raise CheckpointError(f"{inner} is a {kind} where the checkpoint has a directory; move it.")


# ---------------------------------------------------------------- the journal


def finish_journal(target: Path) -> None:
    """Complete a replacement whose process died after its commit.

    Raises:
        CheckpointError: its process is alive.
    """
    journal = target / JOURNAL_NAME
    if not journal.is_dir():
        return
    try:
        owned = take_over(journal) or claim(journal)  # the second where someone has deleted the owner file
    except FileNotFoundError:
        return  # its own process has finished it meanwhile
    except Alive as alive:
        hint = "" if alive.certain else f" If that process is dead, delete {journal / OWNER_NAME} and save again."
        raise CheckpointError(
            f"{describe_owner(journal)} is saving to {target} right now. Give each run its own directory, or wait."
            f"{hint}"
        ) from None
    try:
        _move_into_place(target, owned)
    finally:
        owned.release()


def _move_into_place(target: Path, claim: Claim) -> None:
    """Move the journal's files over the old ones, the manifest last; can be repeated from any point."""
    journal = target / JOURNAL_NAME
    if (journal / MANIFEST_NAME).is_file():
        new = read_manifest(journal / MANIFEST_NAME)
        for name in new.files:
            if (journal / name).is_file():
                make_directories((target / name).parent)
                os.replace(journal / name, target / name)  # noqa: PTH105 - one system call
        for name in _stale(target, new):
            _unlink_own(target, name)
        for parent in {(target / name).parent for name in new.files} | {target}:
            flush_directory(parent)
        os.replace(journal / MANIFEST_NAME, target / MANIFEST_NAME)  # noqa: PTH105
        flush_directory(target)
    _remove_aside(target, journal, claim)


def _remove_aside(target: Path, journal: Path, claim: Claim) -> None:
    """Remove a journal that is done with, under another name: another save may commit to its own name meanwhile."""
    done = target / f".{target.name}{STAGING_MARK}{secrets.token_hex(8)}"
    os.rename(journal, done)  # noqa: PTH104
    _remove_staging(done, claim)


def _stale(target: Path, new: Manifest) -> list[str]:
    """Files of the replaced checkpoint that the new one does not have and that nobody has touched since."""
    try:
        old = read_manifest(target / MANIFEST_NAME)
    except CheckpointError:
        return []  # none, or damaged: then nothing tells whose the files are, and they stay
    return [
        name
        for name, entry in old.files.items()
        if name not in new.files and (path := target / name).is_file() and path.stat().st_size == entry.size_bytes
    ]


# ---------------------------------------------------------------- removal


def remove_leftovers(home: Path, own: Path | None = None) -> list[Path]:
    """Remove what dead saves and interrupted removals left in a directory: only what we made, only if no one owns it.

    Args:
        own: a staging directory of this process, left alone.

    Returns:
        The staging directories of saves that are under way.
    """
    alive = []
    for path in list(home.iterdir()):
        staging, trash = _STAGING.fullmatch(path.name), _TRASH.fullmatch(path.name)
        if not (staging or trash) or path == own or path.is_symlink() or not path.is_dir():
            continue
        with _left_alone_if_impossible(path):
            if trash:
                _remove_checkpoint_files(path)
            elif _owner_is_alive_else_remove(path):
                alive.append(path)
    return alive


@contextlib.contextmanager
def _left_alone_if_impossible(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return  # another process removes it at the same time
    except (OSError, CheckpointError) as error:
        warn_user(f"cannot remove {path}, left by an interrupted save: {error}", RuntimeWarning)


def _owner_is_alive_else_remove(path: Path) -> bool:
    try:
        claim = take_over(path)
    except Alive as alive:
        return alive.certain
    if claim is None:
        _rmdir_if_empty(path)  # killed before it had an owner; anything else in it is not ours to judge
        return False
    try:
        _remove_staging(path, claim)
    finally:
        claim.release()
    return False


def _remove_staging(path: Path, claim: Claim) -> None:
    """Remove a staging directory, its owner file last, so that an interrupted removal can be completed.

    Releases the claim in between: NFS keeps an open file's entry, and the directory would not be empty. Another rank of
    the dead save may still be writing, and begin a file meanwhile: once the directory is gone, it cannot.
    """
    for _ in range(_REMOVAL_ATTEMPTS):
        _empty_staging(path)
        _unlink(path / OWNER_NAME)
        claim.release()
        _rmdir_if_empty(path)
        if not path.exists():
            return


def _empty_staging(path: Path) -> None:
    for directory, names, files in os.walk(path, topdown=False):
        for name in files:
            if Path(directory) != path or name != OWNER_NAME:
                _unlink(Path(directory, name))
        for name in names:
            if Path(directory, name).is_symlink():
                _unlink(Path(directory, name))
            else:
                os.rmdir(Path(directory, name))  # noqa: PTH106


def remove_checkpoint(directory: Path) -> None:
    """Remove a committed checkpoint of ours; what else lies in its directory stays, and so does the directory then.

    Raises:
        CheckpointError: it has no readable manifest, so nothing tells which files are ours; or it is being replaced.
        OSError: as the system reports it.
    """
    finish_journal(directory)
    manifest = read_manifest(directory / MANIFEST_NAME)
    ours = {*manifest.files, MANIFEST_NAME, OWNER_NAME}
    if not _present(directory) <= ours:
        _remove_checkpoint_files(directory)
        return
    trash = directory.with_name(f".{directory.name}{TRASH_MARK}{secrets.token_hex(8)}")
    os.rename(directory, trash)  # noqa: PTH104 - gone for readers at once
    _remove_checkpoint_files(trash)
    flush_directory(directory.parent)


def _present(directory: Path) -> set[str]:
    """All that is no folder, by relative path; links to folders too."""
    return {
        Path(path, name).relative_to(directory).as_posix()
        for path, folders, names in os.walk(directory)
        for name in (*names, *(folder for folder in folders if Path(path, folder).is_symlink()))
    }


def _remove_checkpoint_files(directory: Path) -> None:
    """Unlink what the manifest lists, then the manifest, then the directories that are empty."""
    if (directory / MANIFEST_NAME).is_file():
        manifest = read_manifest(directory / MANIFEST_NAME)
        for name in manifest.files:
            _unlink_own(directory, name)
        for parent in sorted({p for name in manifest.files for p in Path(name).parents[:-1]}, reverse=True):
            _rmdir_if_empty(directory / parent)
        _unlink(directory / OWNER_NAME)
        _unlink(directory / MANIFEST_NAME)
    _rmdir_if_empty(directory)


def _rmdir_if_empty(path: Path) -> None:
    try:
        os.rmdir(path)  # noqa: PTH106
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):  # the last: a link
            raise


def _unlink_own(directory: Path, name: str) -> None:
    """Remove a file of a checkpoint, unless a link that someone put in its place leads elsewhere."""
    parent = Path(os.path.realpath((directory / name).parent))
    if parent.is_relative_to(os.path.realpath(directory)):
        _unlink(parent / Path(name).name)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
