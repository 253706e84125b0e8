"""The questions of `accel config`: a table of them, who asks is left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from accel_state.errors import SettingError
from accel_state.settings import find_setting

Answers = Mapping[str, Any]


class Prompter(Protocol):
    """Who asks; each returns the answer, or None where the user broke off."""

    def select(self, text: str, choices: list[tuple[str, Any]], default: Any) -> Any:
        """One of several: what is shown, and what it means."""

    def text(self, text: str, default: str, check: Callable[[str], bool | str]) -> str | None:
        """A line; `check` says True, or why it is not allowed."""

    def confirm(self, text: str, default: bool) -> bool | None:
        """Yes or no."""


class Question(NamedTuple):
    """One question.

    Attributes:
        key: the setting that it is about.
        text: what is asked.
        choices: allowed answers with a line on each; empty asks for a line, or for yes and no.
        default: what is offered; a function of the answers so far, or a value.
        when: whether the answers so far make it worth asking.
    """

    key: str
    text: str
    choices: tuple[tuple[str, Any], ...] = ()
    default: Callable[[Answers], Any] | Any = None
    when: Callable[[Answers], bool] = bool  # there are answers


def _is(key: str, *values: Any) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(key) in values


def _several(answers: Answers) -> bool:
    return bool(answers.get("num_processes", 1) > 1)


def _on_gpus(answers: Answers) -> bool:
    return answers["num_gpus"] > 0 and _several(answers)


def _fsdp_version(version: int) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers.get("use_fsdp")) and answers.get("fsdp_version") == version


QUESTIONS: Final = (
    Question("num_machines", "How many machines?", default=1),
    Question("main_process_ip", "Host name or address of machine 0", when=lambda a: a["num_machines"] > 1),
    Question("main_process_port", "Its TCP port", default=29500, when=lambda a: a["num_machines"] > 1),
    Question("machine_rank", "Number of this machine, from 0", default=0, when=lambda a: a["num_machines"] > 1),
    Question(
        "num_processes",
        "How many processes in all?",
        default=lambda a: max(1, a.get("num_gpus", 0)) * a["num_machines"],
    ),
    Question(
        "max_restarts",
        "How often may all processes be started again after a failure?",
        default=0,
        when=_several,
    ),
    Question(
        "engine",
        "How is the model spread over the processes?",
        (
            ("copies: each process has the whole model (DDP)", "ddp"),
            ("shards: parameters, gradients and optimizer state are divided (FSDP)", "use_fsdp"),
            ("DeepSpeed: its ZeRO stages and offloading", "use_deepspeed"),
            ("Megatron-LM: its tensor and pipeline parallel models", "use_megatron_lm"),
        ),
        default="ddp",
        when=_several,
    ),
    Question(
        "fsdp_version",
        "Which FSDP?",
        (("2: fully_shard, per parameter", 2), ("1: flat parameters", 1)),
        default=2,
        when=_is("use_fsdp", True),
    ),
    Question(
        "fsdp_sharding_strategy",
        "What is divided?",
        (
            ("FULL_SHARD: parameters, gradients and optimizer state", "FULL_SHARD"),
            ("SHARD_GRAD_OP: gradients and optimizer state", "SHARD_GRAD_OP"),
            ("HYBRID_SHARD: everything, within a machine", "HYBRID_SHARD"),
            ("NO_SHARD: nothing", "NO_SHARD"),
        ),
        default="FULL_SHARD",
        when=_fsdp_version(1),
    ),
    Question(
        "fsdp_reshard_after_forward",
        "Free gathered parameters after forward? Less memory, more communication",
        (("yes", "true"), ("no", "false")),
        default="true",
        when=_fsdp_version(2),
    ),
    Question(
        "fsdp_auto_wrap_policy",
        "Which modules are divided by themselves?",
        (
            ("TRANSFORMER_BASED_WRAP: the layers of a transformer", "TRANSFORMER_BASED_WRAP"),
            ("SIZE_BASED_WRAP: whatever is large enough", "SIZE_BASED_WRAP"),
            ("NO_WRAP: the whole model at once", "NO_WRAP"),
        ),
        default="TRANSFORMER_BASED_WRAP",
        when=_is("use_fsdp", True),
    ),
    Question(
        "fsdp_min_num_params",
        "From how many parameters on?",
        default=100_000_000,
        when=_is("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
    ),
    Question("fsdp_offload_params", "Keep parameters on the CPU?", default=False, when=_is("use_fsdp", True)),
    Question(
        "fsdp_activation_checkpointing",
        "Compute activations anew in backward? Less memory, about a third more computation",
        default=False,
        when=_is("use_fsdp", True),
    ),
    Question(
        "fsdp_state_dict_type",
        "How are weights saved?",
        (
            ("SHARDED_STATE_DICT: each process writes its part", "SHARDED_STATE_DICT"),
            ("FULL_STATE_DICT: gathered on rank 0", "FULL_STATE_DICT"),
        ),
        default="SHARDED_STATE_DICT",
        when=_is("use_fsdp", True),
    ),
    Question(
        "zero_stage",
        "Which ZeRO stage?",
        tuple(
            (f"{stage}: {what}", stage)
            for stage, what in enumerate(("nothing", "optimizer state", "and gradients", "and parameters"))
        ),
        default=2,
        when=_is("use_deepspeed", True),
    ),
    Question(
        "offload_optimizer_device",
        "Where does the optimizer's state lie?",
        (("none: on the GPU", "none"), ("cpu", "cpu"), ("nvme", "nvme")),
        default="none",
        when=_is("use_deepspeed", True),
    ),
    Question("megatron_lm_tp_degree", "Processes that share each matrix", default=1, when=_is("use_megatron_lm", True)),
    Question("megatron_lm_pp_degree", "Processes of a pipeline", default=1, when=_is("use_megatron_lm", True)),
    Question(
        "dynamo_backend",
        "Compile the model?",
        (("no", "no"), ("inductor: torch.compile", "inductor")),
        default="no",
    ),
    Question(
        "mixed_precision",
        "In which numbers does the model compute?",
        (
            ("no: those of its parameters", "no"),
            ("bf16: half the memory, range of float32", "bf16"),
            ("fp16: half the memory, with a gradient scaler", "fp16"),
            ("fp8: matrices in 8 bits, on recent GPUs", "fp8"),
        ),
        default=lambda a: "no" if a.get("cpu") else "bf16",
    ),
    Question("cpu_affinity", "Keep each process on the cores next to its GPU?", default=False, when=_on_gpus),
)


def ask(prompter: Prompter, devices: Mapping[str, int], before: Answers | None = None) -> dict[str, Any] | None:
    """Ask everything that matters for the answers so far.

    Args:
        prompter: who asks.
        devices: kind to how many this machine has.
        before: settings of the file that is changed, offered as defaults.

    Returns:
        Settings by key; None where the user broke off.
    """
    before = before or {}
    num_gpus = devices.get("cuda", 0)
    choices = [(f"GPUs ({num_gpus} here)", False)] if num_gpus or before.get("cpu") is False else []
    choices.append(("CPU only", True))
    is_cpu = prompter.select("On what do the processes run?", choices, before.get("cpu", not num_gpus))
    if is_cpu is None:
        return None
    answers: dict[str, Any] = {"cpu": is_cpu, "num_gpus": 0 if is_cpu else num_gpus}
    for question in QUESTIONS:
        if not question.when(answers):
            continue
        value = _ask_one(prompter, question, answers, before)
        if value is None:
            return None
        if question.key == "engine":
            answers |= {} if value == "ddp" else {value: True}
        else:
            answers[question.key] = value
    del answers["num_gpus"]
    if num_gpus and not is_cpu and answers["num_processes"] > 1:
        answers["multi_gpu"] = True
    return answers


def _ask_one(prompter: Prompter, question: Question, answers: Answers, before: Answers) -> Any:
    default = question.default(answers) if callable(question.default) else question.default
    if question.key == "engine":
        default = next((value for _, value in question.choices if before.get(value)), default)
        return prompter.select(question.text, list(question.choices), default)
    row = find_setting(question.key)
    default = before.get(question.key, default)
    if question.choices:
        known = [value for _, value in question.choices]
        return prompter.select(question.text, list(question.choices), default if default in known else known[0])
    if row.type is bool:
        return prompter.confirm(question.text, bool(default))

    def check(text: str) -> bool | str:
        try:
            row.parse(text.strip(), "argument")
        except SettingError:
            return f"give {row.allowed}"
        return bool(text.strip()) or "give a name"

    text = prompter.text(question.text, "" if default is None else str(default), check)
    return None if text is None else row.parse(text.strip(), question.text)
