"""Give memory back, and find a batch size that fits into it."""

from __future__ import annotations

import functools
import gc
import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch

import accel_state
from accel_state.errors import BatchSizeError, RankFailedError

_LOGGER = logging.getLogger(__name__)
_TEXTS = (  # of errors that libraries raise as plain RuntimeErrors
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's answer where its workspace does not fit
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch keeps for later back to the device; does nothing where there is only a CPU.

    Args:
        garbage_collection: collect garbage first, so that what only cycles hold is given back too.
    """
    if garbage_collection:
        gc.collect()
    for kind in accel_state.live_accelerators():
        kind.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the device's cache, after the caller's names let go of their objects.

    Returns:
        one None per argument: `model, optimizer = release_memory(model, optimizer)`. A function cannot delete its
        caller's names: the memory comes back at the next call (or `clear_device_cache`), once they are overwritten.
    """
    freed: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return freed


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error says that memory ran out: by its type, or by the words of libraries that have no type for it."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _TEXTS)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    smallest_batch_size: int = 1,
) -> Callable[..., Any]:
    """Decorator: call `function(batch_size, ...)` with ever smaller batches until one fits into memory.

    What the failed call held is let go before the next. All ranks take the same size: where one runs out of memory,
    all begin anew. They learn of it when their own call ends, so a rank that another one waits for inside the function
    has to run out of memory on the others too, as it does where all have equal devices and batches.
    A later call begins with the size that fitted.

    Args:
        function: takes the batch size first; the caller leaves it out.
        starting_batch_size: the first size tried.
        reduce_batch_size_fn: gives the next size, without arguments; default: half of the last.
        smallest_batch_size: the last size tried.

    Raises:
        ValueError: sizes that are not positive, or do not shrink.
        TypeError: the function takes no batch size, or the caller passed it.
        BatchSizeError: nothing down to the smallest size fits; lists the sizes that were tried.
        RankFailedError: the function failed on another rank, for a reason other than memory.

    Cost: on several ranks, one small exchange of objects per attempt.
    """
    if not 0 < smallest_batch_size <= starting_batch_size:
        raise ValueError(
            f"starting_batch_size={starting_batch_size}, smallest_batch_size={smallest_batch_size}: the smallest has "
            "to be at least 1 and no more than the first that is tried"
        )
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            smallest_batch_size=smallest_batch_size,
        )
    search = _Search(function, starting_batch_size, reduce_batch_size_fn, smallest_batch_size)

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        return search(args, kwargs)

    return decorated


class _Search:
    """One decorated function and the size that it has come down to."""

    def __init__(
        self, function: Callable[..., Any], size: int, reduce: Callable[[], int] | None, smallest: int
    ) -> None:
        self.function = function
        self.size = size
        self.reduce = reduce or (lambda: self.size // 2)
        self.smallest = smallest

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_own_batch_size(self.function, args)
        tried: list[int] = []
        last = ""
        while self.size >= self.smallest:
            result, failure = self._attempt(args, kwargs)
            out_of_memory = _agree(failure)
            if out_of_memory is None:
                return result
            tried, last = [*tried, self.size], out_of_memory
            clear_device_cache(garbage_collection=True)
            self.size = self._smaller()
            _LOGGER.warning("A batch size of %d does not fit into memory; next is %d.", tried[-1], self.size)
        self.size = tried[-1]  # where a later call, perhaps with more room, begins
        raise BatchSizeError(
            "No executable batch size found, reached zero."
            f" {self.function.__name__!r} ran out of memory with {', '.join(map(str, tried))} (down "
            f"to {self.smallest}). The last error: {last}. Use a smaller model, shorter inputs, "
            "a lower precision, or share the model over more devices."
        )

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Exception | None]:
        try:
            return self.function(self.size, *args, **kwargs), None
        except Exception as error:  # noqa: BLE001  judged in `_agree`, together with the other ranks
            if should_reduce_batch_size(error):
                traceback.clear_frames(error.__traceback__)  # its locals hold the memory that is wanted back
                return None, error.with_traceback(None)
            return None, error

    def _smaller(self) -> int:
        """The next size; one that is not smaller would go on for ever."""
        size = self.reduce()
        if not isinstance(size, int) or size >= self.size:
            raise ValueError(
                f"reduce_batch_size_fn gave {size!r} after {self.size}: it has to give a smaller whole number"
            )
        return size


def refuse_own_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise TypeError where the caller passed what the decorator passes, or the function cannot take it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    names = code.co_varnames[: code.co_argcount]
    takes_any = bool(code.co_flags & 0x04)  # *args
    if takes_any or 1 + len(args) <= len(names):
        return
    shown = ", ".join(f"{name}={value!r}" for name, value in zip(names[1:], args[1:], strict=False))
    raise TypeError(
        f"Batch size was passed into `{function.__name__}` as the first argument when called, or it takes none. The "
        f"decorator passes it: define `{function.__name__}(batch_size, ...)` and call `{function.__name__}({shown})`"
    )


def _agree(failure: Exception | None) -> str | None:
    """What memory error any rank had, after all have tried; raises this rank's or another's failure of another kind."""
    out_of_memory = failure is not None and should_reduce_batch_size(failure)
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = accel_state.gather_object([(said, out_of_memory)])
    if failure is not None and not out_of_memory:
        raise failure
    for rank, (text, ran_out) in enumerate(outcomes):
        if text is not None and not ran_out:
            raise RankFailedError(f"the function that looks for its batch size failed on rank {rank}: {text}")
    return next((text for text, ran_out in outcomes if ran_out), None)
