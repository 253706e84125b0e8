"""``tools/dev``: what it understands, what it refuses, and how quickly it starts."""

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from devtool import cli, environment, tests, tiers
from devtool.paths import ROOT, DevError, packages

DEV = ROOT / "tools" / "dev"


def run_dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DEV, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    done = run_dev("--help")
    assert done.returncode == 0
    for name in cli._COMMANDS:
        assert f"\n    {name} " in done.stdout


def test_an_old_python_can_parse_the_entry_and_is_told_what_is_needed() -> None:
    tree = ast.parse(DEV.read_text(), feature_version=(3, 7))
    first = next(node for node in tree.body if isinstance(node, ast.If))
    assert "version_info" in ast.unparse(first.test)
    assert "needs Python 3.11 or newer" in ast.unparse(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test", "accel-dta"], "there is no 'accel-dta' (did you mean accel-data?)"),
        (["isolated", "numpy"], "there is no 'numpy'; there are: accel, accel-ckpt"),
        (["version", "1.0"], "'1.0' is not a version of the form X.Y.Z"),
        (["bench", "speed"], "there is no 'speed'; there are: "),
    ],
)
def test_a_mistake_is_an_error_that_says_what_is_allowed(arguments: list[str], message: str) -> None:
    done = run_dev(*arguments)
    assert done.returncode == 1
    assert f"tools/dev: error: {message}" in done.stderr


def test_version_prints_what_the_packages_carry() -> None:
    assert run_dev("version").stdout.count(".") == 2


@pytest.mark.parametrize(
    ("given", "own", "passed"),
    [
        (["demo", "--resume", "--epochs", "3"], ["demo"], ["--resume", "--epochs", "3"]),
        (["--torch", "cpu", "demo", "--", "--resume"], ["--torch", "cpu", "demo"], ["--resume"]),
        (["test", "accel", "--", "-k", "demo"], ["test", "accel"], ["-k", "demo"]),
        (["test", "--faults"], ["test", "--faults"], []),
    ],
)
def test_arguments_are_split_from_those_passed_on(given: list[str], own: list[str], passed: list[str]) -> None:
    assert cli._split(given) == (own, passed)


def test_tiers_that_are_not_chosen_are_deselected() -> None:
    assert tiers.marker_expression([]) == "not (parity or faults or clients or engines or xla or gpu or cluster)"
    assert tiers.marker_expression(tiers.MARKERS[1:]) == "not (parity or engines)"
    assert tiers.marker_expression(tiers.MARKERS) == "not (engines)"  # they run in environments of their own


def test_markers_of_the_tiers_are_registered_and_off_by_default(pytestconfig: pytest.Config) -> None:
    registered = [line.split(":")[0] for line in pytestconfig.getini("markers")]
    assert set(tiers.MARKERS) <= set(registered)
    assert tiers.marker_expression([]) in " ".join(pytestconfig.getini("addopts"))


def test_an_empty_tier_is_an_error_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests, "filled_tiers", lambda: ["isolated"])
    with pytest.raises(DevError, match=r"no test yet in the tier\(s\) xla; there are some in: isolated"):
        tests.run_tests([], ["xla"], [])


def test_the_shells_training_settings_do_not_reach_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    found = tests.test_environment(["faults"])
    assert "ACCELERATE_MIXED_PRECISION" not in found
    assert found["ACCEL_TEST_FAULTS"] == "1"
    assert found["OMP_NUM_THREADS"] == "1"


def test_installers_keep_the_users_index_and_nothing_that_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIP_INDEX_URL": "file:///mirror",
        "PIP_TARGET": "elsewhere",
        "PIP_USER": "1",
        "PIP_REQUIRE_HASHES": "1",
        "UV_DEFAULT_INDEX": "file:///mirror",
        "UV_PROJECT_ENVIRONMENT": "elsewhere",
        "UV_EXCLUDE_NEWER": "2020-01-01",
        "VIRTUAL_ENV": "elsewhere",
    }.items():
        monkeypatch.setenv(name, value)
    found = environment.installer_environment()
    assert found["PIP_INDEX_URL"] == found["UV_DEFAULT_INDEX"] == "file:///mirror"
    assert found["PIP_USER"] == found["PIP_REQUIRE_HASHES"] == "0"
    for name in ("PIP_TARGET", "UV_PROJECT_ENVIRONMENT", "UV_EXCLUDE_NEWER", "VIRTUAL_ENV"):
        assert name not in found


class TestSetUp:
    """The steps, with the installing replaced by notes."""

    @pytest.fixture
    def done(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
        notes: list[tuple[str, bool]] = []
        monkeypatch.setattr(environment, "VENV", tmp_path)
        monkeypatch.setattr(environment, "CACHE", tmp_path)
        monkeypatch.setattr(environment, "STATE", tmp_path / "state.json")
        monkeypatch.setattr(environment, "_venv_works", lambda: True)
        monkeypatch.setattr(environment, "_existing_torch", lambda: None)
        monkeypatch.setattr(environment, "_make_venv", lambda: notes.append(("venv", False)))
        monkeypatch.setattr(environment, "_install_torch", lambda torch: notes.append((torch, False)))
        for step in ("uv", "all_pins", "members"):
            monkeypatch.setattr(environment, f"_install_{step}", lambda again, step=step: notes.append((step, again)))
        return notes

    def test_each_step_is_done_once(self, done: list[tuple[str, bool]]) -> None:
        environment.ensure()
        environment.ensure()
        assert done == [("torch==2.13.0", False), ("uv", False), ("all_pins", False), ("members", False)]

    def test_an_interrupted_step_is_done_again_from_scratch(
        self, done: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(_again: bool) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(environment, "_install_all_pins", interrupt)
            with pytest.raises(KeyboardInterrupt):
                environment.ensure()
        environment.ensure()
        assert done == [("torch==2.13.0", False), ("uv", False), ("all_pins", True), ("members", False)]

    def test_an_interrupted_installation_of_torch_starts_with_a_new_environment(
        self, done: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(_torch: str) -> None:
            raise KeyboardInterrupt

        environment.ensure()
        with monkeypatch.context() as patched:
            patched.setattr(environment, "_install_torch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                environment.ensure("torch==2.12.1")
        done.clear()
        environment.ensure()
        assert [name for name, _again in done] == ["venv", "torch==2.13.0", "uv", "all_pins", "members"]

    def test_a_changed_package_costs_only_the_members(
        self, done: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        environment.ensure()
        keys = environment._keys()
        monkeypatch.setattr(environment, "_keys", lambda: {**keys, "members": "changed"})
        environment.ensure()
        assert done[4:] == [("members", False)]

    def test_the_choice_of_torch_is_remembered(self, done: list[tuple[str, bool]]) -> None:
        environment.ensure("torch==2.12.1")
        environment.ensure()
        assert done[0] == ("torch==2.12.1", False)
        assert json.loads(environment.STATE.read_text())["torch"] == "torch==2.12.1"
        environment.ensure("auto")
        assert done[4:] == [("torch==2.13.0", False)]

    def test_an_existing_torch_that_is_not_there_is_an_error(self, done: list[tuple[str, bool]]) -> None:
        with pytest.raises(DevError, match=r"has no torch 2\.9 or newer"):
            environment.ensure("existing")
        assert done == []

    def test_an_unknown_choice_of_torch_is_refused(self, done: list[tuple[str, bool]]) -> None:
        with pytest.raises(DevError, match="'gpu' is neither auto, existing, cpu, cuda nor a requirement"):
            environment.ensure("gpu")


def test_it_starts_quickly_when_nothing_is_missing() -> None:
    environment.ensure()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_dev("setup").returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0


def test_targets_are_the_packages_and_the_shared_folders() -> None:
    assert tests.targets() == [*packages(), "integration-tests", "tools"]
