"""What `accel launch` is told of fp8 is what the recipes of the workers hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses, json
from accel_precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_state.settings import setting

found = {}
for recipe in (TERecipeKwargs(), AORecipeKwargs(), MSAMPRecipeKwargs()):
    found |= dataclasses.asdict(recipe)
print(json.dumps({**found, "mixed_precision": setting("mixed_precision"), "backend": setting("fp8_backend")}))
"""
FLAGS = {
    "fp8-backend": "ao",
    "fp8-format": "E4M3",
    "fp8-margin": "2",
    "fp8-interval": "3",
    "fp8-amax-history-len": "16",
    "fp8-amax-compute-algo": "max",
    "fp8-override-linear-precision": "true,false,true",
    "fp8-opt-level": "O1",
    "fp8-enable-fsdp-float8-all-gather": "false",
    "fp8-pad-inner-dim": "false",
}
EXPECTED = {
    "mixed_precision": "fp8",
    "fp8_format": "E4M3",
    "margin": 2,
    "interval": 3,
    "amax_history_len": 16,
    "amax_compute_algo": "max",
    "override_linear_precision": [True, False, True],
    "use_autocast_during_eval": True,
    "opt_level": "O1",
    "enable_fsdp_float8_all_gather": False,
    "pad_inner_dim": False,
}


@pytest.mark.parametrize("spelling", ["flags", "the peer's flags", "a file"])
def test_every_fp8_option_reaches_the_recipes(tmp_path, spelling):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--mixed-precision", "fp8", "--fp8-use-autocast-during-eval"]
    options += [part for name, value in FLAGS.items() for part in (f"--{name}", value)]
    if spelling == "the peer's flags":
        options = [part.replace("-", "_").replace("__", "--", 1) if part.startswith("--") else part for part in options]
    if spelling == "a file":
        lines = [f"  {name.replace('-', '_').removeprefix('fp8_')}: {value}" for name, value in FLAGS.items()]
        text = "\n".join(["mixed_precision: fp8", "fp8_config:", *lines, "  use_autocast_during_eval: true"])
        (tmp_path / "config.yaml").write_text(text + "\n")
        options = ["--config-file", str(tmp_path / "config.yaml")]
    command = [sys.executable, "-m", "accel_launch", "launch", "--cpu", *options, str(tmp_path / "script.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["backend"].lower() == "ao"
