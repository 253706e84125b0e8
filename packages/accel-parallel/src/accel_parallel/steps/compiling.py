"""Compile a model by torch.compile: as a whole, or its repeated blocks, of which one is compiled for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_parallel import sharding_units
from accel_parallel.plan import PlanContext
from accel_parallel.unwrap import has_compiled_regions, is_compiled_module
from accel_state.errors import AccelError

if TYPE_CHECKING:
    from accel_parallel.dynamo_plugin import TorchDynamoPlugin


@dataclass(frozen=True, kw_only=True)
class CompileModel:
    """Wraps the model in torch's OptimizedModule. See `compile_model`."""

    options: Mapping[str, Any]
    cache_dir: str | None

    name = "compile"
    slot = "compile"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"compiled"})

    def check(self, _model: nn.Module, _context: PlanContext, /) -> list[str]:
        """The backend has to be there."""
        return _complaints(self.options)

    def apply(self, model: nn.Module, _context: PlanContext, /) -> nn.Module:
        """The compiled model; one that is, or that has compiled regions, is returned itself."""
        if is_compiled_module(model) or has_compiled_regions(model):
            return model
        _use_cache(self.cache_dir)
        compiled: Any = torch.compile(model, **self.options)
        if is_compiled_module(compiled):
            keep_names(compiled)
        return compiled  # type: ignore[no-any-return]

    def describe(self, _model: nn.Module | None, _context: PlanContext, /) -> str:
        """By what."""
        return f"the model compiled as a whole by {_in_words(self.options)}, at its first call"


@dataclass(frozen=True, kw_only=True)
class CompileBlocks:
    """Compiles the forward of blocks, in place. See `compile_blocks`."""

    options: Mapping[str, Any]
    cache_dir: str | None
    blocks_of: Callable[[nn.Module], list[nn.Module]]

    name = "compile_blocks"
    slot = "compile_blocks"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset({"compiled"})

    def check(self, model: nn.Module, _context: PlanContext, /) -> list[str]:
        """The backend has to be there, and blocks."""
        try:
            self.blocks_of(model)
        except AccelError as error:
            return [*_complaints(self.options), str(error)]
        return _complaints(self.options)

    def apply(self, model: nn.Module, _context: PlanContext, /) -> nn.Module:
        """The same model; names, classes and state dicts stay as they are."""
        if not is_compiled_module(model):
            _use_cache(self.cache_dir)
            for block in self.blocks_of(model):
                _compile_in_place(block, self.options)
        return model

    def describe(self, model: nn.Module | None, _context: PlanContext, /) -> str:
        """How many blocks, and by what."""
        blocks = "repeated" if model is None else str(len(self.blocks_of(model)))
        return f"{blocks} blocks compiled by {_in_words(self.options)}, at their first call"


def _compile_in_place(block: nn.Module, options: Mapping[str, Any]) -> None:
    """Its forward alone: hooks of FSDP, which torch.compile cannot look into, stay outside."""
    if not is_compiled_module(block) and not hasattr(block.forward, "_torchdynamo_orig_callable"):
        written: Any = block.forward
        compiled: Any = torch.compile(written, **options)
        if compiled is not written:  # as with disable=True
            compiled.written = written  # see `written_forward`
        block.forward = compiled


def keep_names(compiled: Any) -> None:
    """Make a compiled module's state dict have the names of the module inside it, on saving and on loading."""
    compiled._register_state_dict_hook(_strip_wrapper)  # noqa: SLF001 - torch's own wrappers use it
    compiled._register_load_state_dict_pre_hook(_add_wrapper, with_module=False)  # noqa: SLF001


_INNER = "_orig_mod."


def _strip_wrapper(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + _INNER)]:
        state[prefix + name[len(prefix) + len(_INNER) :]] = state.pop(name)


def _add_wrapper(state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(prefix + _INNER)]:
        state[prefix + _INNER + name[len(prefix) :]] = state.pop(name)


def _complaints(options: Mapping[str, Any]) -> list[str]:
    backend = options.get("backend", "inductor")
    if callable(backend):
        return []
    known = torch._dynamo.list_backends(exclude_tags=())  # noqa: SLF001 - its public face hides some
    if backend in known:
        return []
    return [f"torch has no compiler backend {backend!r} here: it has {', '.join(sorted(known))}."]


def _use_cache(directory: str | None) -> None:
    if directory is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory  # torch reads it at each compilation, and nothing else


def _in_words(options: Mapping[str, Any]) -> str:
    others = ", ".join(f"{name}={value}" for name, value in options.items() if name != "backend")
    return f"{options.get('backend', 'inductor')}{f' ({others})' if others else ''}"


def compile_model(*, cache_dir: str | os.PathLike[str] | None = None, **options: Any) -> CompileModel:
    """The step that compiles the whole model, after it was shared over ranks.

    Args:
        cache_dir: where inductor keeps what it compiled, for this and later runs of the process's user; None leaves it
            to torch.
        options: of torch.compile: backend, mode, fullgraph, dynamic, options, disable.

    Cost: seconds to minutes at the first call, and again for new shapes.
    """
    return CompileModel(options=options, cache_dir=None if cache_dir is None else os.fspath(cache_dir))


def compile_blocks(
    wrap: sharding_units.Wrap = "blocks", *, cache_dir: str | os.PathLike[str] | None = None, **options: Any
) -> CompileBlocks:
    """The step that compiles blocks before they are shared over ranks: blocks of one class are compiled once.

    Args:
        wrap: which modules, see `fully_shard_blocks`.
        cache_dir, options: see `compile_model`.
    """
    return CompileBlocks(
        options=options,
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        blocks_of=partial(sharding_units.chosen, wrap=wrap),
    )


def compiling_of(plugin: TorchDynamoPlugin) -> CompileModel | CompileBlocks | None:
    """The step that the plugin asks for, if any. Models without repeated blocks are one region."""
    if not plugin.compiles:
        return None
    options = plugin.to_kwargs()
    if plugin.use_regional_compilation:
        return CompileBlocks(options=options, cache_dir=None, blocks_of=_regions)
    return CompileModel(options=options, cache_dir=None)


def _regions(model: nn.Module) -> list[nn.Module]:
    return sharding_units.repeated_blocks(model) or [model]


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of `module`, in place; one without any is compiled as a whole.

    Args:
        compile_kwargs: of torch.compile.
    """
    for region in _regions(module):
        _compile_in_place(region, compile_kwargs)
    return module


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """`compile_regions` by the name for models under `fully_shard`, whose hooks stay outside of what is compiled."""
    return compile_regions(module, **compile_kwargs)


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """`compile_regions` by the name for models in DeepSpeed's engine; always in place."""
    compile_regions(module, **compile_kwargs)
