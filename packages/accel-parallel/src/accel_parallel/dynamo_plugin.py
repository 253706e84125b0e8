"""Options of torch.compile, with the peer's names."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from accel_state import KwargsHandler
from accel_state.errors import SettingError
from accel_state.settings import setting


class DynamoBackend(enum.StrEnum):
    """The compilers that torch.compile may hand graphs to."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """What torch.compile is told. Fields that are None take their ACCEL_DYNAMO_* variable, else a default.

    Args:
        backend: a `DynamoBackend` or its name in any case; default NO, which compiles nothing.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        fullgraph: refuse to compile in several graphs; default False.
        dynamic: True compiles for changing shapes, False for each shape anew, None lets torch find out.
        options: of the backend; not together with another mode than "default".
        disable: leave the compiled model to run as it is, for debugging.
        use_regional_compilation: compile the model's repeated blocks instead of the whole, so that one is compiled for
            all; default False.

    Raises:
        SettingError: a backend that does not exist.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given = setting("dynamo_backend") if self.backend is None else self.backend
        word = str(getattr(given, "value", given)).upper()
        if word not in DynamoBackend.__members__:
            raise SettingError(
                f"dynamo backend {given!r} does not exist: use one of {', '.join(DynamoBackend.__members__)}"
            )
        self.backend = DynamoBackend[word]
        if self.mode is None:
            self.mode = setting("dynamo_mode") or "default"
        if self.fullgraph is None:
            self.fullgraph = bool(setting("dynamo_use_fullgraph"))
        if self.dynamic is None:
            self.dynamic = setting("dynamo_use_dynamic")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = bool(setting("dynamo_use_regional_compilation"))

    @property
    def compiles(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """All fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of torch.compile that differ from its defaults, whoever said so."""
        neutral = {"backend": "no", "mode": "default", "fullgraph": False, "dynamic": None, "options": None}
        neutral["disable"] = False
        given = self.to_dict()
        return {name: given[name] for name, default in neutral.items() if given[name] != default}
