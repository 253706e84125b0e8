"""The attention functions of the transformers library, which its models look up by name in every forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from accel_state.errors import PlanError

from .context_block import open_context
from .ulysses import ulysses_attention

CONTEXT_PARALLEL = "accel_context_parallel"
_ULYSSES = "accel_ulysses"


def implementation_of(model: nn.Module) -> str | None:
    """The name of the attention that a transformers model computes; None for other models."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name


def missing_interface(model: nn.Module) -> list[str]:
    """Why the attention of a transformers model cannot be replaced; empty if it can, or if it is none."""
    if implementation_of(model) is None or hasattr(model, "set_attn_implementation"):
        return []
    return [
        "the model has no set_attn_implementation, by which its attention is shared: use transformers 4.57 or newer."
    ]


def use_context_parallel(model: nn.Module) -> None:
    """Let a model's attention reach over the cp ranks in a `sequence_context`, and be as it was outside.

    The library makes a mask where positions jump, as a rank's do: inside there is none, and attention is causal or full
    as the module says.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    core = _registered("sdpa")

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = open_context()
        if context is not None:
            _refuse_window(kwargs, query.shape[2] * context.ring.size, "cp")
        return core(module, query, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if open_context() is None else None

    AttentionMaskInterface.register(CONTEXT_PARALLEL, mask)
    _use(model, CONTEXT_PARALLEL, attention)


def use_ulysses(model: nn.Module, core_name: str, group: dist.ProcessGroup) -> None:
    """Let a model's attention, of the name `core_name`, run over whole sequences for this rank's heads.

    No mask is made: none is registered for the name, so attention is causal or full as the module says.
    """
    core = _registered(core_name)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if mask is not None:
            raise PlanError("under sp the model made an attention mask: only causal and full attention can be shared")
        _refuse_window(kwargs, query.shape[2] * dist.get_world_size(group), "sp")
        kwargs.pop("position_ids", None)  # of this rank's part alone; kernels take jumps in them for several sequences

        def over_whole_sequences(q_bntd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor) -> Tensor:
            with _groups_of(module, q_bntd.shape[1] // k_bmtd.shape[1]):
                out_btnd: Tensor = core(module, q_bntd, k_bmtd, v_bmtd, None, **kwargs)[0]
            return out_btnd.transpose(1, 2)

        return ulysses_attention(query, key, value, over_whole_sequences, group).transpose(1, 2).contiguous(), None

    _use(model, f"{_ULYSSES}.{core_name}.{group.group_name}", attention)


def core_of(implementation: str) -> str:
    """The attention beneath our own name for it."""
    return implementation.split(".")[1] if implementation.startswith(_ULYSSES) else implementation


def _registered(name: str) -> Callable[..., Any]:
    from transformers import AttentionInterface

    function: Callable[..., Any] = AttentionInterface()[name]
    return function


def _use(model: Any, name: str, attention: Callable[..., Any]) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def _refuse_window(kwargs: dict[str, Any], length: int, axis: str) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < length:
        raise PlanError(
            f"under {axis} attention in a window of {window} positions cannot be shared, and the sequence has "
            f"{length}: use sequences of at most {window}, or a model whose attention is plainly causal"
        )


@contextmanager
def _groups_of(module: Any, groups: int) -> Iterator[None]:
    """Heads of keys that were repeated for the ranks have fewer queries each; the library's functions read how many."""
    usual = getattr(module, "num_key_value_groups", groups)
    if usual == groups:
        yield
        return
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        module.num_key_value_groups = usual
