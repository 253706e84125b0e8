"""What each rank prints in files of its own, and marked on the console."""

from pathlib import Path

import pytest

from accel_launch.spawn.logs import Log, open_logs, read_tee
from accel_state.errors import LaunchError

BOTH, OUT, ERR, NONE = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", [BOTH] * 2),
        ("3", [BOTH] * 2),
        ("1", [OUT] * 2),
        ("2", [ERR] * 2),
        ("1:2", [NONE, ERR]),
        ("0:1,1:3", [OUT, BOTH]),
    ],
)
def test_which_streams_get_a_file(text, found):
    assert read_tee(text, 2) == found


@pytest.mark.parametrize("text", ["4", "x", "2:1", "0:9", ""])
def test_other_words_are_refused(text):
    with pytest.raises(LaunchError, match=r"--tee .*is not allowed; give 1"):
        read_tee(text, 2)


def test_files_and_prefixes(accel):
    accel.script("""
        import os, sys
        rank = os.environ["RANK"]
        sys.stdout.write("half "); sys.stdout.flush()
        print("line of", rank)
        print("error of", rank, file=sys.stderr)
        print("bar 1\\rbar 2")
    """)
    done = accel("launch", "--cpu", "--num-processes", "2", "--log-dir", "logs", "--log-prefix", "train.py")
    assert done.returncode == 0
    # text mode has made a new line of the progress bar's \r, which gets no prefix of its own
    expected = [line for rank in range(2) for line in (f"[{rank}] half line of {rank}", f"[{rank}] bar 1", "bar 2")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    for rank in range(2):
        assert (accel.folder / f"logs/{rank}/stdout.log").read_text() == f"half line of {rank}\nbar 1\nbar 2\n"
        assert (accel.folder / f"logs/{rank}/stderr.log").read_text() == f"error of {rank}\n"


def test_one_process_has_a_file_too(accel):
    accel.script("print('hello')")
    done = accel("launch", "--cpu", "--log-dir", "logs", "--tee", "1", "train.py")
    assert done.stdout == "hello\n"
    assert [path.name for path in (accel.folder / "logs/0").iterdir()] == ["stdout.log"]


def test_a_folder_that_cannot_be_made_is_refused(accel):
    accel.script("print('hello')")
    (accel.folder / "logs").touch()
    done = accel("launch", "--cpu", "--log-dir", "logs", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--log-dir: 'logs/0/stdout.log' cannot be written" in done.stderr


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, capsys):
    log = Log(tmp_path / "stdout.log")
    log.close()
    log = Log(Path("/dev/full"))
    log.write(b"some")
    log.write(b"more")
    assert capsys.readouterr().err == "accel launch: /dev/full ends here: No space left on device\n"


def test_no_folder_means_no_files():
    assert open_logs(None, "0", 0, 2) == [[None, None], [None, None]]
