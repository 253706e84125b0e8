"""What a user may choose about 8-bit floats (the peer's names, fields and mutability).

A field left at None is read from the launcher's settings when the object is made, then takes its default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel_state import KwargsHandler
from accel_state.errors import PrecisionError
from accel_state.settings import setting

ModuleFilter = Callable[[nn.Module, str], bool]

FORMATS = ("HYBRID", "E4M3", "E5M2")
AMAX_ALGORITHMS = ("max", "most_recent")
SCALINGS = ("delayed", "current", "block", "mxfp8")
OPT_LEVELS = ("O1", "O2")
DELAYED_DEFAULTS: dict[str, Any] = {
    "margin": 0,
    "interval": 1,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
}
"""The options that only delayed scaling has."""


def _or_setting(value: Any, key: str, default: Any) -> Any:
    """The value given, else what the launcher handed on, else the default."""
    found = setting(key) if value is None else value
    return default if found is None else found


def _require(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PrecisionError(f"{name}={value!r} is not allowed for fp8: use one of {', '.join(map(repr, allowed))}.")


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Training in 8-bit floats by torchao.

    Args:
        config: torchao's `Float8LinearConfig`; tensorwise dynamic scaling by default.
        module_filter_func: `(layer, name) -> bool`, which layers to convert; by default
            `filter_first_and_last_linear_layers`.
        pad_inner_dim: pad matrices whose inner dimension does not divide by 16; True by default.
        enable_fsdp_float8_all_gather: gather sharded parameters in 8 bits; True by default. Where parameters are not
            sharded nothing is gathered and it has no meaning.

    Raises:
        PrecisionError: a config together with a field that contradicts it.
    """

    config: Any = None
    module_filter_func: ModuleFilter | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            given = getattr(self, name)
            if self.config is None:
                setattr(self, name, _or_setting(given, f"fp8_{name}", True))
                continue
            of_config = getattr(self.config, name)
            if given is not None and given != of_config:
                raise PrecisionError(
                    f"{name}={given!r} contradicts config.{name}={of_config!r}: set it in the config alone."
                )
            setattr(self, name, of_config)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Training in 8-bit floats by NVIDIA's transformer-engine.

    Args:
        use_autocast_during_eval: compute in 8 bits in evaluation too; False by default, which gives better metrics.
        margin: of the scale, in powers of two; 0 by default.
        interval: updates between new scales; 1 by default, the only one that present releases know.
        fp8_format: "HYBRID" (E4M3 forward, E5M2 backward), "E4M3" or "E5M2"; "HYBRID" by default.
        amax_history_len: updates that a scale looks back on; 1024 by default.
        amax_compute_algo: "max" or "most_recent" of them; "most_recent" by default.
        override_linear_precision: compute (forward, gradients of inputs, gradients of weights) in more bits.
        use_mxfp8_block_scaling: a scale for each block of 32 numbers, by the hardware; False by default.
        recipe: ours: how scales are found, one of "delayed" (the default), "current", "block" and "mxfp8", or a ready
            object of `transformer_engine.common.recipe`. `margin` to `override_linear_precision` belong to "delayed".

    Raises:
        PrecisionError: a value that is not allowed, or one that would have no effect.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    recipe: Any = None

    def __post_init__(self) -> None:
        self.use_autocast_during_eval = _or_setting(
            self.use_autocast_during_eval, "fp8_use_autocast_during_eval", False
        )
        for name in ("margin", "interval", "amax_history_len", "amax_compute_algo"):
            setattr(self, name, _or_setting(getattr(self, name), f"fp8_{name}", DELAYED_DEFAULTS[name]))
        if self.override_linear_precision is None:
            forward, inputs, weights = (bool(setting(f"fp8_override_{part}")) for part in ("fprop", "dgrad", "wgrad"))
            self.override_linear_precision = (forward, inputs, weights)
        self.fp8_format = str(_or_setting(self.fp8_format, "fp8_format", "HYBRID")).upper()
        self.use_mxfp8_block_scaling = bool(self.use_mxfp8_block_scaling)
        self._check()

    @property
    def scaling(self) -> str | None:
        """How scales are found, one of `SCALINGS`; None for a ready object."""
        if self.use_mxfp8_block_scaling:
            return "mxfp8"
        return "delayed" if self.recipe is None else self.recipe if isinstance(self.recipe, str) else None

    def _check(self) -> None:
        _require("fp8_format", self.fp8_format, FORMATS)
        if not callable(self.amax_compute_algo):
            _require("amax_compute_algo", self.amax_compute_algo, AMAX_ALGORITHMS)
        if len(self.override_linear_precision or ()) != 3:
            raise PrecisionError(
                f"override_linear_precision={self.override_linear_precision!r} is not allowed: give three bools, for "
                "the forward pass, the gradients of inputs and those of weights."
            )
        if isinstance(self.recipe, str):
            _require("recipe", self.recipe, SCALINGS)
        if self.use_mxfp8_block_scaling and self.recipe not in (None, "mxfp8"):
            raise PrecisionError(f"use_mxfp8_block_scaling=True contradicts recipe={self.recipe!r}: give one of them.")
        without_effect = [name for name, default in DELAYED_DEFAULTS.items() if getattr(self, name) != default]
        if self.scaling != "delayed" and without_effect:
            raise PrecisionError(
                f"{', '.join(without_effect)} belong to delayed scaling and have no effect with "
                f"{'a ready recipe' if self.scaling is None else repr(self.scaling)}: leave them out."
            )


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Training in 8-bit floats by MS-AMP, which is no longer published: kept so that its use is answered clearly.

    Args:
        opt_level: "O1" or "O2"; "O2" by default.

    Raises:
        PrecisionError: another level.
    """

    opt_level: str | None = None

    def __post_init__(self) -> None:
        self.opt_level = str(_or_setting(self.opt_level, "fp8_opt_level", "O2"))
        _require("opt_level", self.opt_level, OPT_LEVELS)


@dataclass
class FP8RecipeKwargs(KwargsHandler):
    """Deprecated: the fields of all libraries in one. Use `AORecipeKwargs` or `TERecipeKwargs`.

    Args:
        opt_level: of `MSAMPRecipeKwargs`.
        use_autocast_during_eval, margin, interval, fp8_format, amax_history_len, amax_compute_algo,
            override_linear_precision, use_mxfp8_block_scaling: of `TERecipeKwargs`.
        backend: "TE" or "MSAMP"; from the settings by default, then "TE".

    Raises:
        PrecisionError: another backend.
    """

    opt_level: str | None = None
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated: use AORecipeKwargs or TERecipeKwargs.", FutureWarning, stacklevel=3
        )
        self.backend = str(_or_setting(self.backend, "fp8_backend", "TE")).upper()
        _require("backend", self.backend, ("TE", "MSAMP"))

    def specific(self) -> TERecipeKwargs | MSAMPRecipeKwargs:
        """The same as the backend's own recipe."""
        if self.backend == "MSAMP":
            return MSAMPRecipeKwargs(opt_level=self.opt_level)
        fields = {name: value for name, value in vars(self).items() if name not in ("opt_level", "backend")}
        return TERecipeKwargs(**fields)


Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | FP8RecipeKwargs
