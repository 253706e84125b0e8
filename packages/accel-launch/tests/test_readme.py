"""Every example of the README, run as a reader would."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
SCRIPT, *PYTHON = [text for language, text in BLOCKS if language == "python"]
CONSOLE = [text for language, text in BLOCKS if language == "console"]


@pytest.mark.parametrize("block", CONSOLE)
def test_console(accel, block):
    accel.script(SCRIPT)
    command, _, expected = block.removeprefix("$ accel ").partition("\n")
    done = accel(*command.split())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.replace(sys.executable, "python").splitlines()) == sorted(expected.splitlines())


@pytest.mark.parametrize("block", PYTHON)
def test_python(accel, block):
    accel.script(SCRIPT)
    example = accel.script(block, "example.py")
    subprocess.run([sys.executable, example], cwd=accel.folder, env=accel.environ, check=True, timeout=60)


def test_the_command_of_your_own(capsys):
    names: dict = {}
    exec(PYTHON[-1], names)
    parser = argparse.ArgumentParser()
    names["register"](parser.add_subparsers())
    arguments = parser.parse_args(["hello"])
    arguments.func(arguments)
    assert capsys.readouterr().out == "hello\n"
