"""`accelerate` answered by accel: each test runs in processes of its own, since an installed alias stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.compat import ALIAS_FOLDER, API_LEVEL, child_environment

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code, or with `arguments` a command line, in a fresh Python; returns what it printed.

    `python_path` are the folders on PYTHONPATH; `fails` expects an error and returns its text.
    """

    def run(code: str = "", *arguments: str, python_path: tuple[Path, ...] = (), fails: bool = False) -> str:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if python_path:
            environ["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
        command = [sys.executable, *(arguments or ("-c", textwrap.dedent(code)))]
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout.strip()

    return run


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder in which another `accelerate`, with metadata, is installed."""
    site = tmp_path / "site"
    (site / "accelerate").mkdir(parents=True)
    (site / "accelerate" / "__init__.py").write_text("__version__ = '0.0.1'\nfrom accelerate import utils\n")
    (site / "accelerate" / "utils.py").write_text("who = 'foreign'\n")
    info = site / "accelerate-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n")
    return site


def test_import_find_spec_and_metadata_all_find_accel(run: Run) -> None:
    run("""
        import accel.compat
        accel.compat.install()
        accel.compat.install()
        import importlib.metadata, importlib.util
        import accelerate, accelerate.utils.operations
        import accel_tracking
        from accelerate.tracking import GeneralTracker
        from accelerate.utils import LoggerType
        from accelerate.utils.dataclasses import LoggerType as same

        assert importlib.util.find_spec("accelerate").origin == accelerate.__file__
        assert importlib.util.find_spec("accelerate.commands.launch") is not None
        assert importlib.metadata.version("accelerate") == accelerate.__version__ == accel.compat.API_LEVEL
        assert importlib.metadata.packages_distributions()["accelerate"] == ["accelerate"]
        assert len(importlib.metadata.files("accelerate")) > 40
        assert GeneralTracker is accel_tracking.GeneralTracker
        assert LoggerType is same is accel_tracking.LoggerType is accel.utils.LoggerType
        assert "LoggerType" in dir(accelerate.utils) and "LoggerType" in accelerate.utils.__all__
        assert accelerate.hooks.__name__ == "accelerate.hooks"  # a module that nobody imported
    """)


def test_the_alias_itself_costs_no_torch(run: Run) -> None:
    code = (
        "import accel.compat, sys; accel.compat.install(); import accelerate.utils.tqdm; print('torch' in sys.modules)"
    )
    assert run(code) == "False"


def test_it_wins_over_an_installed_package_only_when_asked(run: Run, foreign: Path) -> None:
    code = """
        import importlib.metadata, importlib.util
        import accel.compat
        before = importlib.metadata.version("accelerate"), importlib.util.find_spec("accelerate").origin
        accel.compat.install()
        print(before[0], importlib.metadata.version("accelerate"))
        import accelerate
        assert before[1] != importlib.util.find_spec("accelerate").origin == accelerate.__file__
    """
    assert run(code, python_path=(foreign,)) == f"0.0.1 {API_LEVEL}"


def test_a_package_that_is_loaded_already_cannot_be_replaced(run: Run, foreign: Path) -> None:
    error = run("import accelerate, accel.compat; accel.compat.install()", python_path=(foreign,), fails=True)
    assert f"AliasError: `accelerate` was imported already, from {foreign / 'accelerate' / '__init__.py'}" in error
    assert "python -m accel.compat" in error


def test_children_see_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
        import multiprocessing, subprocess, sys

        def where():
            import accelerate
            return accelerate.__file__

        if __name__ == "__main__":
            import accel.compat
            accel.compat.install()
            seen = [subprocess.check_output(
                [sys.executable, "-c", "import accelerate; print(accelerate.__file__)"], text=True).strip()]
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    seen.append(pool.apply(where))
            print(*seen, sep="\\n")
        """)
    )
    assert run("", "main.py").splitlines() == [str(ALIAS_FOLDER / "accelerate" / "__init__.py")] * 3


def test_pickles_go_both_ways(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "pickle"
    run(f"""
        import pickle, accel.compat
        accel.compat.install()
        from accelerate.utils import LoggerType
        pickle.dump(LoggerType.WANDB, open({str(file)!r}, "wb"))
        theirs = b"caccelerate.utils.dataclasses\\nLoggerType\\n."  # how the peer's pickles name the class
        assert pickle.loads(theirs) is LoggerType
    """)
    assert run(f"import pickle; print(pickle.load(open({str(file)!r}, 'rb')))") == "wandb"


@pytest.mark.parametrize("order", ["alias first", "alias last"])
def test_a_python_without_accel_gets_the_real_package(run: Run, foreign: Path, order: str) -> None:
    code = """
        import accelerate.utils
        import accelerate, importlib.metadata, sys
        print(accelerate.__version__, accelerate.utils.who, importlib.metadata.version("accelerate"))
    """
    folders = (ALIAS_FOLDER, foreign) if order == "alias first" else (foreign, ALIAS_FOLDER)
    assert run("", "-S", "-c", textwrap.dedent(code), python_path=folders) == "0.0.1 foreign 0.0.1"


def test_a_python_with_neither_says_so(run: Run) -> None:
    error = run("", "-S", "-c", "import accelerate", python_path=(ALIAS_FOLDER,), fails=True)
    assert error.splitlines()[-1] == "ModuleNotFoundError: No module named 'accelerate'"


def test_a_broken_accel_is_not_hidden(run: Run, tmp_path: Path) -> None:
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "__init__.py").write_text("import something_missing\n")
    error = run("", "-S", "-c", "import accelerate", python_path=(ALIAS_FOLDER, tmp_path), fails=True)
    assert error.splitlines()[-1] == "ModuleNotFoundError: No module named 'something_missing'"


def test_what_is_not_offered_yet_names_its_owner(run: Run) -> None:
    run("""
        import accel.compat
        accel.compat.install()
        import accelerate.utils, accel.utils
        from accel.compat import places, table

        absent = next(n for n, owner in accel.utils._NAMES.items() if not table.is_offered(n, owner))
        owner = accel.utils._NAMES[absent].replace("_", "-")
        assert not hasattr(accelerate.utils, absent) and absent not in dir(accelerate.utils)
        for module in ("accelerate.utils", "accel.utils"):
            said = f"accel does not offer {module}.{absent} yet; it belongs to {owner}"
            try:
                exec(f"from {module} import {absent}")
            except ImportError as error:
                assert str(error) == said, error
            else:
                raise AssertionError("imported")
            try:
                exec(f"import {module}; {module}.{absent}")
            except AttributeError as error:
                assert str(error) == said, error
            else:
                raise AssertionError("found")
        try:
            from accelerate.utils import not_a_name_of_anyone
        except ImportError as error:
            assert "cannot import name 'not_a_name_of_anyone'" in str(error)
    """)


@pytest.mark.parametrize(
    "imports",
    [
        "from accelerate.utils import tqdm",
        "import accelerate.utils.tqdm; from accelerate.utils import tqdm",
        "from accelerate.utils.tqdm import tqdm; import accelerate.utils; assert accelerate.utils.tqdm is tqdm",
        "import importlib; tqdm = importlib.import_module('accelerate.utils.tqdm')",
        "from accelerate.utils import *",
    ],
)
def test_tqdm_is_a_function_and_a_module(run: Run, imports: str) -> None:
    code = f"""
        import accel.compat
        accel.compat.install()
        {imports.replace("; ", chr(10) + "        ")}
        assert list(tqdm(range(3), main_process_only=False, disable=True)) == [0, 1, 2]
        from accelerate.utils.tqdm import tqdm
    """
    run(code)


def test_a_script_runs_unmodified(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "neighbour.py").write_text("name = 'neighbour'\n")
    (tmp_path / "folder" / "script.py").write_text(
        "import sys, accelerate, neighbour\nprint(__name__, accelerate.__version__, neighbour.name, *sys.argv)\n"
    )
    script = str(Path("folder", "script.py"))
    shown = f"__main__ {API_LEVEL} neighbour {script} --lr 1"
    assert run("", "-m", "accel.compat", script, "--lr", "1") == shown


def test_a_module_runs_unmodified(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys, accelerate\nprint(__name__, accelerate.__version__, *sys.argv[1:])\n")
    assert run("", "-m", "accel.compat", "-m", "job", "-x") == f"__main__ {API_LEVEL} -x"


def test_the_launcher_runs_a_script_unmodified(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import accelerate\nprint(accelerate.__version__)\n")
    command = ("-m", "accel", "launch", "--cpu", "--num-processes", "2", "--as-accelerate", "script.py")
    assert run("", *command).split() == [API_LEVEL, API_LEVEL]


@pytest.mark.parametrize(
    ("arguments", "said"), [(("nothing.py",), "there is no script 'nothing.py'"), ((), "usage:"), (("-m",), "usage:")]
)
def test_a_script_that_is_not_there(run: Run, arguments: tuple[str, ...], said: str) -> None:
    assert said in run("", "-m", "accel.compat", *arguments, fails=True)


def test_help_is_printed(run: Run) -> None:
    assert run("", "-m", "accel.compat", "--help").startswith("usage: python -m accel.compat")


@pytest.mark.parametrize("module", ["accelerate.commands.launch", "accelerate.commands.accelerate_cli"])
def test_the_commands_run_as_modules(run: Run, module: str) -> None:
    assert "usage: accel" in run("", "-m", module, "--help", python_path=(ALIAS_FOLDER,))


def test_the_environment_for_children_is_a_copy() -> None:
    environ = {"PYTHONPATH": os.pathsep.join(["a", str(ALIAS_FOLDER), "b"]), "HOME": "x"}
    child = child_environment(environ)
    assert child == {"PYTHONPATH": os.pathsep.join([str(ALIAS_FOLDER), "a", "b"]), "HOME": "x"}
    assert environ["PYTHONPATH"].startswith("a")
    assert child_environment({}) == {"PYTHONPATH": str(ALIAS_FOLDER)}
