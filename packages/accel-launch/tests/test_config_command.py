"""`accel config`: the questions, the file that they make, and what explains it."""

import json

import pytest

from accel_launch import read_config
from accel_launch.commands.config import interview, write_basic_config
from accel_launch.questionnaire import ask
from accel_launch.writing import config_text


class Scripted:
    """A prompter that answers by what the question is about, else with what is offered."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def _answer(self, text, default):
        self.asked.append(text)
        return next((value for words, value in self.answers.items() if words.replace("_", " ") in text), default)

    def select(self, text, choices, default):
        answer = self._answer(text, default)
        assert answer is None or answer in [value for _, value in choices]
        return answer

    def text(self, text, default, check):
        answer = self._answer(text, default)
        assert answer is None or check(answer) is True
        return answer

    def confirm(self, text, default):
        return self._answer(text, default)


def test_offers_make_a_run_on_this_machine():
    assert ask(Scripted(), {"cuda": 4}) == {
        "cpu": False,
        "num_machines": 1,
        "num_processes": 4,
        "max_restarts": 0,
        "dynamo_backend": "no",
        "mixed_precision": "bf16",
        "cpu_affinity": False,
        "multi_gpu": True,
    }
    one = Scripted()
    assert ask(one, {"cuda": 0})["cpu"] is True
    assert not any("spread" in text for text in one.asked)  # one process is spread over nothing


def test_questions_follow_from_answers():
    prompter = Scripted(machines="2", machine_0="head", spread="use_fsdp", are_divided="SIZE_BASED_WRAP")
    answers = ask(prompter, {"cuda": 2})
    assert answers["num_processes"] == 4  # two machines like this one
    assert (answers["main_process_ip"], answers["main_process_port"]) == ("head", 29500)
    assert (answers["use_fsdp"], answers["fsdp_version"], answers["fsdp_min_num_params"]) == (True, 2, 100_000_000)
    assert "zero_stage" not in answers and "fsdp_sharding_strategy" not in answers


def test_what_the_file_said_is_offered():
    before = {"cpu": True, "num_processes": 3, "mixed_precision": "fp16", "use_deepspeed": True, "zero_stage": 3}
    answers = ask(Scripted(), {"cuda": 0}, before)
    assert {key: answers[key] for key in before} == before


@pytest.mark.parametrize("question", ["what_do", "machines", "many_processes", "numbers"])
def test_breaking_off_asks_no_more(question):
    assert ask(Scripted(**{question: None}), {"cuda": 0}) is None


def test_bad_answers_are_not_taken():
    class Checks(Scripted):
        def text(self, text, default, check):
            assert check("none at all") == "give an integer of at least 1" or "machine" not in text
            return super().text(text, default, check)

    assert ask(Checks(), {"cuda": 0})["num_machines"] == 1


def test_the_interview_writes_a_file_that_is_read_back(tmp_path, capsys):
    path = tmp_path / "new" / "config.yaml"
    interview(str(path), Scripted(what_do=True, many_processes="2", numbers="bf16"))
    text = capsys.readouterr().out
    assert "2 processes on this machine" in text and f"written: {path}" in text
    assert read_config(path).values["num_processes"] == 2
    assert [other.name for other in path.parent.iterdir()] == ["config.yaml"]


def test_nothing_is_written_when_the_preview_is_declined(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(SystemExit, match="130"):
        interview(str(path), Scripted(what_do=True, Write=False))
    assert not path.exists()


def test_what_is_written_is_read_back(tmp_path):
    values = {
        "use_fsdp": True,
        "fsdp_version": 2,
        "use_parallelism_config": True,
        "parallelism_config_tp_size": 2,
        "dynamo_backend": "inductor",
        "mixed_precision": "no",
        "max_restarts": 3,
    }
    path = tmp_path / "config.yaml"
    path.write_text(config_text(values, {"tpu_name": "pod"}))
    file = read_config(path)
    assert (file.values, file.others) == (values, {"tpu_name": "pod"})


def test_arrow_keys(tmp_path):
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from accel_launch.prompting import TerminalPrompter

    down, enter = "\x1b[B", "\r"
    with create_pipe_input() as keys:
        prompter = TerminalPrompter(input=keys, output=DummyOutput())
        keys.send_text(down + enter)
        assert prompter.select("Which?", [("a", 1), ("b", 2)], 1) == 2
        keys.send_text(enter)
        assert prompter.select("Which?", [("a", 1), ("b", 2)], 2) == 2
        keys.send_text("7" + enter)
        assert prompter.text("How many?", "1", lambda text: text == "17" or "no") == "17"
        keys.send_text("n")
        assert prompter.confirm("Sure?", True) is False
        keys.send_text("\x03")
        assert prompter.select("Which?", [("a", 1)], 1) is None


def test_default_writes_once(accel):
    done = accel("config", "--default", "--config_file", "c.yaml")
    assert (done.returncode, done.stdout) == (0, "written: c.yaml\n")
    again = accel("config", "default", "--config-file", "c.yaml", "--mixed_precision", "bf16")
    assert again.returncode == 2 and "c.yaml is there already" in again.stderr
    assert read_config(accel.folder / "c.yaml").values == {
        "cpu": True,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
    }


def test_write_basic_config_as_the_peer_has_it(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    assert write_basic_config("bf16", str(path)) == path
    assert write_basic_config("no", str(path)) is False
    assert read_config(path).values["mixed_precision"] == "bf16"


def test_update_gives_old_keys_their_present_names(accel):
    path = accel.folder / "c.yaml"
    path.write_text("fp16: true\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_backward_prefetch_policy: NO_PREFETCH\n")
    assert accel("config", "update", "--config-file", "c.yaml").returncode == 0
    assert path.read_text() == (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_backward_prefetch: NO_PREFETCH\nmixed_precision: fp16\n"
    )
    missing = accel("config", "update")
    assert missing.returncode == 2 and "there is no file to update" in missing.stderr


def test_explain_names_every_origin(accel):
    (accel.folder / "c.yaml").write_text("num_processes: 2\nuse_cpu: true\n")
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    done = accel("config", "explain", "--config-file", "c.yaml", env=environ)
    assert done.stdout.splitlines() == [
        "configuration file: c.yaml",
        "  cpu = True  (file c.yaml: use_cpu)",
        "  mixed_precision = bf16  (environment ACCELERATE_MIXED_PRECISION)",
        "  num_processes = 2  (file c.yaml: num_processes)",
    ]
    found = json.loads(accel("config", "explain", "--all", "--json", env=environ).stdout)
    assert found["mixed_precision"]["value"] == "bf16" and found["grace_s"]["origin"] == "default"


def test_questions_need_a_terminal(accel):
    done = accel("config")
    assert done.returncode == 2 and "this is no terminal: use `accel config --default`" in done.stderr
