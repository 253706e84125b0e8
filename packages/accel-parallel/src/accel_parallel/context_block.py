"""A block in which tensors hold this rank's part of a sequence, and attention sees the whole of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import PlanError, SettingError

from .attention_routing import RoutedAttention
from .axis_handlers import CP_COMM_STRATEGIES
from .ring import Ring, ring_attention
from .sequence_shards import load_balanced_positions


@dataclass
class OpenContext:
    """The block that is open: what models ask where they are.

    Args:
        ring: the ranks that share the sequence.
        length: of the whole sequence; None where nothing was cut here, so that it is not known.
        attention_calls: how often attention was computed over all ranks; None where torch does that.
        originals: by the identity of a buffer, what it was before it was cut; empty where torch cut it.
    """

    ring: Ring
    length: int | None
    attention_calls: int | None = 0
    originals: dict[int, Tensor] = field(default_factory=dict)

    def positions(self, local_length: int, device: torch.device) -> Tensor:
        """The places in the sequence of this rank's tokens.

        Raises:
            PlanError: this rank's part has another length.
        """
        length = local_length * self.ring.size if self.length is None else self.length
        if local_length * self.ring.size != length:
            raise PlanError(
                f"a sequence of {local_length} positions was given to a model in a context that cut sequences of "
                f"{length} into {self.ring.size} parts of {length // self.ring.size}: name every tensor with a "
                "sequence among the buffers"
            )
        return load_balanced_positions(length, self.ring.size, self.ring.rank, device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence."""
        if dropout_p:
            raise PlanError(
                f"under cp attention weights cannot be dropped (dropout_p={dropout_p}): set the model's attention "
                "dropout to 0"
            )
        if q.shape[-2] != k.shape[-2]:
            raise PlanError(
                f"under cp attention of {q.shape[-2]} positions over {k.shape[-2]} others cannot be shared: both have "
                "to be this rank's part of one sequence"
            )
        if self.length is not None and q.shape[-2] * self.ring.size != self.length:
            self.positions(q.shape[-2], q.device)  # raises
        assert self.attention_calls is not None
        self.attention_calls += 1
        return ring_attention(q, k, v, self.ring, is_causal=is_causal, scale=scale)


_open: ContextVar[OpenContext | None] = ContextVar("accel_sequence_context", default=None)


def open_context() -> OpenContext | None:
    """The innermost block of this thread, None outside."""
    return _open.get()


@contextmanager
def sequence_context(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    *,
    rotation: str = "allgather",
) -> Iterator[None]:
    """Context parallelism for one forward and backward: to be made anew for each batch.

    Inside, each buffer holds this rank's positions (`load_balanced_positions`), in the same tensor object, and
    `scaled_dot_product_attention` reaches over all ranks. Afterwards buffers are what they were, also after an
    exception. On CUDA torch's `context_parallel` does both, elsewhere our ring attention. The backward belongs
    inside too: it may read what was cut.

    Args:
        mesh: the cp axis, `mesh["cp"]`.
        buffers: all tensors along the sequence: tokens, labels shifted by one before (`shift_labels`), positions.
        buffer_seq_dims: the dim of each along which its sequence runs.
        no_restore_buffers: those of `buffers` that may stay cut, which saves the copy on CUDA.
        rotation: how keys and values travel, "allgather" or "alltoall".

    Raises:
        SettingError: numbers of buffers and dims differ, `no_restore_buffers` has others, or an unknown rotation.
        PlanError: sequences of different lengths, or of one that cannot be dealt evenly; a block inside a block.

    Cost: per attention, see `ring_attention`; cutting sends nothing.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    length = _checked_length(buffers, dims, kept, mesh.size())
    if rotation not in CP_COMM_STRATEGIES:
        raise SettingError(f"rotation={rotation!r} does not exist: use one of {', '.join(CP_COMM_STRATEGIES)}")
    if open_context() is not None:
        raise PlanError("a sequence context is open already, and its tensors are cut: leave it before opening another")
    by_torch = mesh.device_type == "cuda"
    context = OpenContext(Ring(mesh.get_group(), rotation), length, None if by_torch else 0)
    token = _open.set(context)
    try:
        if by_torch:
            with _torch_context(mesh, buffers, dims, set(no_restore_buffers or ()), rotation):
                yield
        else:
            with _cut(buffers, dims, kept, context), RoutedAttention(context.attend, "under cp"):
                yield
    finally:
        _open.reset(token)


@contextmanager
def _cut(buffers: list[Tensor], dims: list[int], kept: set[int], context: OpenContext) -> Iterator[None]:
    """The tensor objects are pointed to other memory and back, so their values are never written over.

    Autograd counts that as a change, so a backward that would read a restored tensor fails instead of going wrong.
    """
    originals = [buffer.detach() for buffer in buffers]
    shards = []
    for buffer, dim in zip(originals, dims, strict=True):
        positions = context.positions(buffer.shape[dim] // context.ring.size, buffer.device)
        shards.append(buffer.index_select(dim, positions))
    context.originals = {id(buffer): original for buffer, original in zip(buffers, originals, strict=True)}
    for buffer, shard in zip(buffers, shards, strict=True):
        _point(buffer, shard)
    try:
        yield
    finally:
        for buffer, original in zip(buffers, originals, strict=True):
            if id(buffer) not in kept:
                _point(buffer, original)


def _point(buffer: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


@contextmanager
def _torch_context(
    mesh: DeviceMesh, buffers: list[Tensor], dims: list[int], kept: set[Tensor], rotation: str
) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept):
        yield


def _checked_length(buffers: list[Tensor], dims: list[int], kept: set[int], ranks: int) -> int | None:
    """The length of all buffers' sequences."""
    if len(buffers) != len(dims):
        raise SettingError(f"{len(buffers)} buffers have {len(dims)} buffer_seq_dims: give one dim for each buffer")
    known = {id(buffer) for buffer in buffers}
    if len(known) != len(buffers):
        raise SettingError("a tensor stands twice among the buffers: name each once")
    if not kept <= known:
        raise SettingError(
            f"{len(kept - known)} of {len(kept)} no_restore_buffers are not among the buffers: only what is cut can "
            "stay cut. The very same tensor objects have to stand in both"
        )
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise SettingError(f"buffer {index} has {buffer.dim()} dims, so its buffer_seq_dims cannot be {dim}")
        if buffer.requires_grad:
            raise PlanError(f"buffer {index} requires a gradient: only inputs and constants can be cut in place")
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise PlanError(
            f"the buffers' sequences have the lengths {lengths}: they have to be one sequence's, cut at the same places"
        )
    if not lengths:
        return None
    load_balanced_positions(lengths[0], ranks, 0)  # raises where it cannot be dealt
    return lengths[0]
