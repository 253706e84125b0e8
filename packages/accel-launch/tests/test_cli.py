"""The `accel` command itself: help, versions, mistakes, and how little it imports."""

import importlib.metadata
import subprocess
import sys

import pytest

import accel_launch
from accel_launch.discovery import find_commands
from accel_launch.parser import CommandParser


@pytest.mark.parametrize("module", ["importlib.metadata", "inspect", "email"])
def test_help_imports_nothing_slow(module):
    code = f"""
import sys
from accel_launch.cli import main
try:
    main(["--help"])
except SystemExit:
    sys.exit({module!r} in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["launch", "--help"], ["env"], ["launch", "--cpu", "--dry-run", __file__]]
)
def test_no_command_imports_torch(arguments):
    code = """
import sys
from accel_launch.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)


def test_without_a_command_it_shows_the_commands(accel):
    done = accel()
    assert done.returncode == 0
    assert "launch" in done.stdout
    assert "env" in done.stdout


def test_version(accel):
    assert accel("--version").stdout == f"accel {importlib.metadata.version('accel-launch')}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lunch"], "unknown command 'lunch'; did you mean 'launch'?"),
        (["--verson"], "unknown argument --verson; did you mean '--version'?"),
        (["launch", "--num_proceses", "2", "x.py"], "unknown argument --num_proceses; did you mean '--num_processes'?"),
        (["launch", "--num-proceses=2", "x.py"], "unknown argument --num-proceses=2; did you mean '--num-processes'?"),
        (["launch", "--num_proc", "2", "x.py"], "unknown argument --num_proc; did you mean '--num_processes'?"),
        (["launch", "--num_processes", "-2", "x.py"], "'-2' is not allowed; give an integer of at least 1"),
        (["launch", "--num_processes", "0", "x.py"], "'0' is not allowed; give an integer of at least 1"),
        (["launch", "--main_process_port", "65536", "x.py"], "give an integer from 0 to 65535"),
        (["launch", "--mixed_precision", "fp17", "x.py"], "'fp17' is not allowed; give one of no, fp16, bf16, fp8"),
        (["launch"], "the following arguments are required: script"),
        (["launch", "--cpu", "x.py"], "there is no script 'x.py'"),
    ],
)
def test_a_mistake_is_two_lines_at_most_and_code_2(accel, arguments, words):
    done = accel(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2


def test_discovery_finds_what_importlib_finds():
    declared = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="accel.commands")}
    assert find_commands() == declared
    assert {"launch", "env"} <= set(declared)


def test_discovery_reads_only_its_section_and_the_first_wins(tmp_path):
    for place, target in (("a", "first:register"), ("b", "second:register")):
        metadata = tmp_path / place / "some-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "entry_points.txt").write_text(
            f"[console_scripts]\nlaunch = other:main\n\n[accel.commands]\nplan = {target}\n\n[more]\nx = y:z\n"
        )
    (tmp_path / "a" / "bare-1.0.dist-info").mkdir()
    path = [str(tmp_path / "absent"), str(tmp_path / "a"), str(tmp_path / "b")]
    assert find_commands(path) == {"plan": "first:register"}


def test_a_broken_package_does_not_take_the_others_along(accel, tmp_path):
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text("[accel.commands]\nbroken = no_such_module:register\n")
    done = accel("--help", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    assert "accel: 'broken' cannot be loaded from no_such_module:register: ModuleNotFoundError" in done.stderr
    assert "launch" in done.stdout


def test_public_names_exist():
    for name in accel_launch.__all__:
        assert getattr(accel_launch, name) is not None


def test_the_parser_serves_other_programs():
    parser = accel_launch.launch_command_parser()
    args = parser.parse_args(["--num_processes", "2", "--mixed-precision", "BF16", "-m", "pkg.mod", "--cpu", "x"])
    assert (args.num_processes, args.mixed_precision, args.module, args.cpu) == (2, "bf16", True, False)
    assert (args.training_script, args.training_script_args) == ("pkg.mod", ["--cpu", "x"])
    nothing = parser.parse_args(["x.py"])
    assert (nothing.cpu, nothing.multi_gpu, nothing.debug, nothing.num_processes) == (False, False, None, None)

    mine = CommandParser(prog="mine")
    accel_launch.launch_command_parser(mine.add_subparsers())
    assert mine.parse_args(["launch", "x.py", "--flag"]).training_script_args == ["--flag"]
