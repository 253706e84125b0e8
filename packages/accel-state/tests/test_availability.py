"""Availability checks: right, cached, and without importing what they ask about."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import accel_state
from accel_state import availability, device_checks, devices
from accel_state.errors import MissingExtraError

CHECKS = sorted(name for name in accel_state.__all__ if name.startswith("is_") and name.endswith("_available"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder on the path, and no answers from before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for module in (availability, device_checks, devices):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def install(folder: Path, name: str, version: str = "1.0", code: str = "raise SystemError('imported')") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_answers_yes_or_no(name: str) -> None:
    check = getattr(accel_state, name)
    assert check() in (True, False)
    assert check() is check()


@pytest.mark.parametrize("library", ["wandb", "deepspeed", "comet_ml", "transformers", "msamp", "peft", "swanlab"])
def test_a_package_that_raises_when_imported_is_found_and_not_imported(packages: Path, library: str) -> None:
    check = getattr(accel_state, f"is_{library}_available")
    before = check()
    install(packages, library)
    assert check() is before, "the first answer is kept"
    forget()
    assert check() is True
    assert library not in sys.modules


def test_a_folder_of_logs_is_no_package(packages: Path) -> None:
    (packages / "wandb" / "run-1").mkdir(parents=True)
    assert not accel_state.is_wandb_available()


def test_a_parent_that_raises_something_else_makes_its_module_unusable(packages: Path) -> None:
    install(packages, "megatron", code="raise RuntimeError('no CUDA')")
    assert not accel_state.is_megatron_lm_available()


@pytest.mark.parametrize(("version", "is_enough"), [("0.38.1", False), ("0.39.0", True), ("0.40.0.dev1", True)])
def test_a_release_is_compared(packages: Path, version: str, is_enough: bool) -> None:
    install(packages, "bitsandbytes", version)
    assert accel_state.is_4bit_bnb_available() is is_enough
    assert accel_state.is_bnb_available()
    assert accel_state.is_bnb_available(min_version="0.39.0") is is_enough


def test_a_release_that_is_none_is_that_of_newer_sources(packages: Path) -> None:
    install(packages, "bitsandbytes", "git-abc")
    assert accel_state.is_4bit_bnb_available() and accel_state.is_bnb_available(min_version="99")
    with pytest.raises(ValueError, match="bitsandbytes calls its release 'git-abc', which cannot be compared"):
        accel_state.compare_versions("bitsandbytes", ">=", "0.39")


def test_rich_has_to_be_asked_for(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages, "rich")
    assert not accel_state.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert accel_state.is_rich_available()


def test_transformer_engine_needs_its_part_for_torch(packages: Path) -> None:
    install(packages, "transformer_engine")
    assert not accel_state.is_transformer_engine_available()
    forget()
    (packages / "transformer_engine" / "pytorch").mkdir()
    (packages / "transformer_engine" / "pytorch" / "__init__.py").write_text("")
    assert accel_state.is_transformer_engine_available()


def test_a_broken_device_plugin_is_named_and_does_without(packages: Path) -> None:
    install(packages, "torch_npu", code="raise OSError('libascend.so: cannot open')")
    with pytest.warns(UserWarning, match=r"torch_npu is installed but cannot be imported: OSError: libascend.so"):
        assert not accel_state.is_npu_available()
    assert accel_state.get_current_device_type()[0] != "npu"


def test_a_tpu_and_a_gpu_cannot_be_asked_for_at_once() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        accel_state.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_what_needs_a_library_says_so(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)

    @accel_state.deepspeed_required
    def configure() -> int:
        return 1

    with pytest.raises(MissingExtraError, match=r"configure needs deepspeed, which is not installed"):
        configure()


@pytest.mark.parametrize(
    ("version", "operation", "other", "holds"),
    [
        ("2.10.0", ">", "2.9", True),
        ("2.10.0", "<=", "2.9", False),
        ("1.0rc1", "<", "1.0", True),
        ("1.0", "==", "1.0.0", True),
        ("1.0", "!=", "1.1", True),
        ("torch", ">=", "2.9", True),
    ],
)
def test_releases_are_compared_as_numbers(version: str, operation: str, other: str, holds: bool) -> None:
    assert accel_state.compare_versions(version, operation, other) is holds


def test_an_unknown_comparison_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operation='=>' is not known; allowed are >, >="):
        accel_state.compare_versions("1.0", "=>", "2.0")


def test_torch_is_compared_without_its_local_part() -> None:
    import torch

    release = torch.__version__.partition("+")[0]
    assert accel_state.is_torch_version("==", release)
    assert not accel_state.is_torch_version("<", "2.9")
