"""The report for bug reports."""

import importlib.metadata
import json
import platform


def test_json(accel):
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCEL_MIXED_PRECISON": "bf16", "ACCEL_DEBUG_MODE": "maybe"}
    found = json.loads(accel("env", "--json", env=environ).stdout)
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["versions"]["accel-launch"] == importlib.metadata.version("accel-launch")
    assert found["devices"]["cuda"] == 0  # the fixture hides all
    assert found["settings"]["mixed_precision"] == {
        "value": "bf16",
        "origin": "environment ACCELERATE_MIXED_PRECISION",
    }
    assert found["settings"]["debug"]["origin"].startswith("error: debug from environment ACCEL_DEBUG_MODE: 'maybe'")
    assert found["warnings"] == [
        "ACCEL_MIXED_PRECISON is set but nothing reads it; did you mean 'ACCEL_MIXED_PRECISION'?"
    ]
    assert found["process"]["world_size"] == 1


def test_text(accel):
    done = accel("env", env={"RANK": "1"})
    assert done.returncode == 0
    assert "  cpu: False  (default)\n" in done.stdout
    assert "  error: RANK=1 but WORLD_SIZE is not set" in done.stdout
    assert "  CUDA_VISIBLE_DEVICES: \n" in done.stdout


def test_the_configuration_file_is_shown(accel):
    (accel.folder / "c.yaml").write_text("num_processes: 2\n")
    shown = accel("env", "--config_file", "c.yaml").stdout
    assert "configuration file\n  path: c.yaml\n  num_processes: 2\n" in shown
    assert "error: the configuration file 'absent' cannot be read" in accel("env", "--config_file", "absent").stdout
