"""The parser that other libraries import: the peer's flags, words and defaults."""

import pytest

from accel_launch import CustomArgumentGroup, CustomArgumentParser, launch_command, launch_command_parser
from accel_launch.flags import given_flags
from accel_state.errors import LaunchError


def given(*arguments):
    return given_flags(launch_command_parser().parse_args([*arguments, "train.py"]))


def test_only_flags_that_were_given_count():
    assert given() == {}
    assert given("--cpu", "--fsdp_version", "1", "--max-restarts", "0") == {
        "cpu": True,
        "fsdp_version": 1,
        "max_restarts": 0,
    }


def test_the_namespace_holds_the_peers_defaults():
    args = launch_command_parser().parse_args(["train.py"])
    assert (args.fsdp_version, args.fsdp_sharding_strategy, args.dynamo_mode) == ("1", "FULL_SHARD", "default")
    assert (args.cpu, args.debug, args.num_processes, args.monitor_interval) == (False, None, None, 0.1)


def test_what_a_caller_changes_in_the_namespace_counts():
    args = launch_command_parser().parse_args(["train.py"])
    args.num_processes, args.fsdp_version, args.multi_gpu = 3, "2", True
    assert given_flags(args) == {"num_processes": 3, "fsdp_version": "2", "multi_gpu": True}


@pytest.mark.parametrize("spelling", ["--fsdp-offload-params", "--fsdp_offload_params"])
def test_yes_and_no_of_plugins_are_words(spelling):
    assert given(spelling, "false") == {"fsdp_offload_params": False}


def test_three_words_for_fp8():
    assert given("--fp8_override_linear_precision", "true,false,true") == {
        "fp8_override_fprop": True,
        "fp8_override_dgrad": False,
        "fp8_override_wgrad": True,
    }
    with pytest.raises(SystemExit):
        given("--fp8_override_linear_precision", "true")


@pytest.mark.parametrize("flag", ["--vm", "--env", "--aws_access_key_id", "--aws-secret-access-key"])
def test_what_has_no_engine_is_refused(flag):
    with pytest.raises(LaunchError, match=f"{flag.replace('_', '-')}: "):
        given(flag, "x")


def test_a_namespace_can_be_launched(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import os; print('precision', os.environ['ACCELERATE_MIXED_PRECISION'])")
    args = launch_command_parser().parse_args(["--cpu", str(script)])
    args.mixed_precision = "bf16"
    launch_command(args)
    assert capfd.readouterr().out == "precision bf16\n"


def test_parsers_of_other_programs_take_both_spellings():
    parser = CustomArgumentParser("program")
    parser.add_argument("--num_steps", type=int)
    parser.add_argument("-v", "--be-loud", action="store_true")
    parser.add_argument("a_file")
    group = parser.add_argument_group("more")
    assert isinstance(group, CustomArgumentGroup)
    group.add_argument("--seed_of_all", type=int)
    for line in ("--num-steps 2 --be_loud --seed-of-all 3 x", "--num_steps 2 -v --seed_of_all 3 x"):
        found = vars(parser.parse_args(line.split()))
        assert found == {"num_steps": 2, "be_loud": True, "seed_of_all": 3, "a_file": "x"}
    assert "more" in parser.format_help()
