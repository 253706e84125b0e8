"""Code around a module's forward: what runs before it, what after, and how it is attached and taken away."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class ModelHook:
    """What can run around a module's forward; subclasses override what they need.

    Attributes:
        no_grad: whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward; returns its positional and keyword arguments."""
        del module
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called with the forward's output; returns what the caller gets."""
        del module
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called instead of `post_forward` when the forward raised, to let go what `pre_forward` took."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is taken away; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks one after the other.

    Args:
        hooks: in the order in which they run, before the forward as after it.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's, on what the one before returned."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each hook's, on what the one before returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each hook's, on what the one before returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Each hook's."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's, on what the one before returned."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooks_of(module: nn.Module) -> Iterator[ModelHook]:
    """The single hooks that are attached to a module."""
    hook = vars(module).get("_hf_hook")
    if isinstance(hook, SequentialHook):
        yield from hook.hooks
    elif hook is not None:
        yield hook


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """Attach a hook; the module keeps its class, and its own forward in `_old_forward`.

    Args:
        append: run it after the hook that is there; else that one is taken away first.

    Returns:
        What the hook's `init_hook` returns: the module, if the hook does nothing special.
    """
    attached = vars(module).get("_hf_hook")
    if attached is not None and append:
        _take_away(module)  # it goes on in the sequence
        hook_to_init, hook = hook, SequentialHook(*hooks_in(attached), *hooks_in(hook))
    else:
        if attached is not None:
            remove_hook_from_module(module)
        hook_to_init = hook
    old_forward = module.forward
    changed = hook_to_init.init_hook(module)
    vars(changed).update(_hf_hook=hook, _old_forward=old_forward)  # names that clients look for
    wrapped = functools.partial(_forward_with_hook, changed)
    changed.forward = functools.update_wrapper(wrapped, old_forward)
    return changed  # type: ignore[return-value] # a hook may return another module, which is then what is hooked


def hooks_in(hook: ModelHook) -> tuple[ModelHook, ...]:
    """The hooks of a sequence, or the one itself."""
    return hook.hooks if isinstance(hook, SequentialHook) else (hook,)


def _forward_with_hook(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = vars(module)["_hf_hook"]
    own_forward = vars(module)["_old_forward"]
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = own_forward(*args, **kwargs)
        else:
            output = own_forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Take a module's hook away, and give it back its own forward. Without a hook nothing happens.

    Args:
        recurse: also from all modules inside.
    """
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        _take_away(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _take_away(module: nn.Module) -> None:
    del vars(module)["_hf_hook"]
    own: Any = vars(module).pop("_old_forward")
    if getattr(own, "__func__", None) is getattr(type(module), "forward", None):
        del module.__dict__["forward"]  # the class has it
    else:
        module.forward = own


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks away from a module and all modules inside."""
    remove_hook_from_module(module, recurse=True)
