"""From a prepared model back to the user's own."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` made this module. Does not import the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled_regions(module: Any) -> bool:
    """Whether `module`, or any module in it, was compiled."""
    if is_compiled_module(module):
        return True
    return isinstance(module, nn.Module) and any(
        is_compiled_module(part) or _has_compiled_forward(part) for part in module.modules()
    )


def _has_compiled_forward(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def written_forward(module: nn.Module) -> Any:
    """A module's forward before it was compiled by itself."""
    forward = module.forward
    inner = getattr(forward, "_torchdynamo_orig_callable", forward)
    return getattr(forward, "written", inner)  # the compiler packs what is no plain function into one


def inside_compiled(module: Any) -> Any:
    """What was compiled; a module that was not comes back itself."""
    return module._orig_mod if is_compiled_module(module) else module  # noqa: SLF001 - the compiler's only way in


def inner_model(model: Any) -> Any:
    """The user's own object inside wrappers for data parallelism and compilation, never a view of it.

    What a prepared model is known by, and has its parameters' names from.
    """
    while True:
        if is_compiled_module(model):
            model = inside_compiled(model)
        elif isinstance(model, DistributedDataParallel | DataParallel | FullyShardedDataParallel):
            model = model.module
        else:
            return model


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model inside the wrappers that preparing added.

    Nothing is taken away from the prepared model, which keeps working: where less is wanted than the model has, the
    result is a view, another object of the same class over the same parameters and submodules. A pipelined model has no
    whole one inside and comes back itself.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: False gives a view whose forward runs without autocast and output conversion.
        keep_torch_compile: False leaves the compiled wrapper away too; blocks that were compiled one by one are views
            that run as they were written.
        recursive: also unwrap submodules that were wrapped.
    """
    compiled = _last_compiled(model)
    model = inner_model(model)
    if not keep_fp32_wrapper:
        model = _without_autocast(model)
    if recursive:
        model = _with_bare_children(model, keep_fp32_wrapper, keep_torch_compile)
    if not keep_torch_compile:
        return _without_compiled_regions(model, {}) if has_compiled_regions(model) else model
    if compiled is None:
        return model
    if not keep_fp32_wrapper:
        compiled = _without_autocast(compiled)
    if inside_compiled(compiled) is model:
        return compiled
    return type(compiled)(model, compiled.dynamo_ctx)


def _last_compiled(model: Any) -> Any:
    """The last compiled wrapper on the way to the user's model; None without one."""
    compiled = None
    while True:
        if is_compiled_module(model):
            compiled, model = model, inside_compiled(model)
        elif isinstance(model, DistributedDataParallel | DataParallel | FullyShardedDataParallel):
            model = model.module
        else:
            return compiled


def _without_compiled_regions(model: nn.Module, views: dict[int, nn.Module]) -> nn.Module:
    """The module, or a view of it where it or a part of it is compiled; a part with two places has one view.

    Args:
        views: those made so far, by the identity of what they are views of.
    """
    if id(model) in views:
        return views[id(model)]
    children: dict[str, Any] = vars(model)["_modules"]
    bare = {
        name: _without_compiled_regions(inside_compiled(child), views) if child is not None else None
        for name, child in children.items()
    }
    is_compiled = _has_compiled_forward(model)
    result = model
    if is_compiled or any(child is not children[name] for name, child in bare.items()):
        result = object.__new__(type(model))
        result.__dict__.update(vars(model), _modules=bare)
    if is_compiled:
        written = written_forward(model)
        del result.__dict__["forward"]
        if getattr(written, "__self__", None) is not model:  # changed by another step before it was compiled
            result.__dict__["forward"] = written
    views[id(model)] = result
    return result


def _without_autocast(model: Any) -> Any:
    """accel-precision's forward offers the view itself; it is met by shape."""
    make_view = getattr(vars(model).get("forward"), "bare_view", None) if isinstance(model, nn.Module) else None
    return model if make_view is None else make_view(model)


def _with_bare_children(model: Any, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> Any:
    if not isinstance(model, nn.Module):
        return model
    children: dict[str, Any] = vars(model)["_modules"]
    bare = {
        name: extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
        for name, child in children.items()
    }
    if all(child is children[name] for name, child in bare.items()):
        return model
    view = object.__new__(type(model))
    view.__dict__.update(vars(model), _modules=bare)
    return view


def class_before_sharding(item: Any) -> type:
    """An object's class; of a module that `fully_shard` gave a class of its own, the one before it.

    Names in checkpoints come from it, so that they are the same however a model is spread.
    """
    kind = getattr(item, "model_class", None) or type(item)  # of stages, the class of the model that was cut
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not issubclass(kind, module.FSDPModule) or module.FSDPModule not in kind.__bases__:
        return kind
    return next(base for base in kind.__bases__ if base is not module.FSDPModule)


def is_peft_model(model: Any) -> bool:
    """Whether a model, prepared or not, is one of peft's. Does not import peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)
