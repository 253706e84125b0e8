"""Inference with a model that is traced and cut into one stage per rank, under the peer's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils import _pytree as pytree

from accel_parallel.dispatch.planner import infer_auto_device_map, layer_sizes
from accel_parallel.dispatch.sizes import Memory
from accel_parallel.pipeline.config import PipelineConfig
from accel_parallel.pipeline.cutting import balanced_runs
from accel_parallel.pipeline.model import PipelinedModel
from accel_state import (
    PartialState,
    broadcast,
    broadcast_object_list,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)
from accel_state.collectives.trees import recursively_apply
from accel_state.errors import PlanError, SettingError

Model = TypeVar("Model", bound=nn.Module)
_KEPT_SHAPES = 8  # traces that are kept, one per shape of micro-batches


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: Memory | None = None,
) -> Mapping[str, int | str]:
    """Which rank has which layer: runs of layers, in the order in which they are registered.

    Args:
        num_processes: ranks.
        no_split_module_classes: names of classes whose modules stay whole.
        max_memory: rank -> bytes; None makes the largest run as small as can be.

    Raises:
        PlanError: the model has fewer layers than there are ranks.
    """
    if max_memory is not None or num_processes == 1:
        return infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
    modules = {name for name, _ in model.named_modules()}
    layers = [(name, size) for name, size in layer_sizes(model, no_split_module_classes) if name in modules]
    if len(layers) < num_processes:
        raise PlanError(
            f"{type(model).__name__} has {len(layers)} layers, fewer than the {num_processes} ranks: use fewer, or "
            "let more classes be split"
        )
    runs = balanced_runs([max(size, 1) for _, size in layers], num_processes)
    return {layers[index][0]: rank for rank, run in enumerate(runs) for index in run}


def find_pippy_batch_size(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> int | None:
    """The first dimension of the first tensor among a model's inputs; None without any."""
    values = [*(args or ()), *(kwargs or {}).values()]
    return next((size for size in map(ignorant_find_batch_size, values) if size is not None), None)


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> PipelinedModel:
    """This rank's stage of a model that torch traces and cuts.

    Args:
        split_points: names of the modules that begin the second and later stages, one per further rank.
        args, kwargs: inputs of one micro-batch.
        num_chunks: micro-batches per batch.

    Raises:
        PlanError: not as many stages as ranks, a name of no module, or a model that cannot be traced.
    """
    state = PartialState()
    names = {name for name, _ in model.named_modules()}
    unknown = [name for name in split_points if name not in names]
    if unknown or len(split_points) != state.num_processes - 1:
        raise PlanError(
            f"split_points={list(split_points)} make {len(split_points) + 1} stages for {state.num_processes} ranks"
            + (f", and {', '.join(unknown)} are no modules of the model" if unknown else "")
            + ": name the modules that begin the second and later stages, one per further rank, or use 'auto'"
        )
    cuts = {f"model.{name}": SplitPoint.BEGINNING for name in split_points}
    try:
        with _restored(model, split_points):
            pipe = pipeline(_Through(model), mb_args=tuple(args), mb_kwargs=dict(kwargs or {}), split_spec=cuts)
    except Exception as error:  # what torch.export raises has no common class
        raise PlanError(
            f"torch cannot trace {type(model).__name__}: {error}. Give example inputs of the shapes that will be used, "
            "and see torch.export for what a traced model may not do"
        ) from error
    stage = pipe.get_stage_module(state.process_index).to(state.device)
    config = PipelineConfig(schedule="gpipe", num_microbatches=num_chunks)
    assert dist.group.WORLD is not None
    return PipelinedModel(
        {state.process_index: stage},
        state.num_processes,
        config,
        state.device,
        dist.group.WORLD,
        type(model),
        tuple(model.state_dict()),
        pipe.info(),
    )


class _Through(nn.Module):
    """Takes all inputs in the first stage: torch gives later ones only what a stage before them has made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, on copies."""
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        return self.model(*args, **kwargs)


@contextmanager
def _restored(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Torch's tracer marks the cuts by forwards of these modules, and leaves them there."""
    own = [(vars(model.get_submodule(name)), dict(vars(model.get_submodule(name)))) for name in names]
    try:
        yield
    finally:
        for attributes, before in own:
            attributes.clear()
            attributes.update(before)


class _Stages:
    """The stage of this rank, traced for each shape of micro-batches.

    Args:
        model: the whole model, under its own forward.
    """

    def __init__(self, model: nn.Module, split_points: Sequence[str], num_chunks: int) -> None:
        self.model, self.split_points, self.num_chunks = model, split_points, num_chunks
        self._traced: dict[Any, tuple[PipelinedModel, pytree.TreeSpec]] = {}

    def for_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PipelinedModel, pytree.TreeSpec]:
        """The stage for micro-batches like these, and the layout of the model's output."""
        key = _shapes((tuple(args), dict(kwargs)))
        if key not in self._traced:
            while len(self._traced) >= _KEPT_SHAPES:
                self._traced.pop(next(iter(self._traced)))
            stage = build_pipeline(self.model, self.split_points, args, kwargs, self.num_chunks)
            self._traced[key] = stage, _output_layout(self.model, args, kwargs)
        return self._traced[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A batch, whose size the number of chunks divides, through all stages."""
        size = find_pippy_batch_size(args, kwargs)
        assert size is not None
        first = slice(0, size // self.num_chunks)
        part_args, part_kwargs = recursively_apply(
            lambda leaf: leaf[first] if leaf.ndim and leaf.shape[0] == size else leaf, (args, kwargs)
        )
        stage, layout = self.for_inputs(part_args, part_kwargs)
        output = stage(*args, **kwargs)
        leaves = [output] if isinstance(output, Tensor) else list(output or ())
        return pytree.tree_unflatten(leaves, layout) if len(leaves) == layout.num_leaves else output


def _output_layout(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> pytree.TreeSpec:
    """How the model's output is nested, which a traced model forgets; nothing is computed."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        return pytree.tree_structure(model(*args, **kwargs))


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, Mapping):
        return tuple((key, _shapes(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(_shapes(value) for value in tree)
    return repr(tree)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """One batch through a pipeline. All ranks call it with the same batch.

    A batch that cannot be cut into equal chunks is filled up with copies of its first sample, which are cut off again.

    Args:
        forward: what a batch goes through; gives the output on the last rank.
        num_chunks: micro-batches per batch.
        gather_output: whether all ranks get the output; else the last one does, and the others None.

    Raises:
        SettingError: no tensor among the inputs.

    Cost: activations travel once per cut and micro-batch; the output once if it is gathered.
    """
    state = PartialState()
    size = find_pippy_batch_size(args, kwargs)
    if size is None:
        raise SettingError("a pipelined model needs a tensor with a batch dimension among its inputs, and got none")
    args, kwargs = send_to_device((args, kwargs), state.device)
    padded = pad_input_tensors((args, kwargs), size, num_chunks)
    output = forward(*padded[0], **padded[1])
    if size % num_chunks and output is not None:
        output = slice_tensors(output, slice(0, size))
    if not gather_output or state.num_processes == 1:
        return output
    last = state.num_processes - 1
    layout = [get_data_structure(output) if state.process_index == last else None]
    broadcast_object_list(layout, from_process=last)
    if state.process_index != last:
        output = send_to_device(initialize_tensors(layout[0]), state.device)
    return broadcast(output, from_process=last)


def prepare_pippy(
    model: Model,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Collection[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> Model:
    """Let a model's forward run as a pipeline over all ranks, each of which computes one stage. For inference.

    The model's `hf_split_points` are where it was cut. On one process it stays as it is.

    Args:
        model: the same on all ranks, on the CPU.
        split_points: "auto" balances the stages by their weights; or names of the modules that begin the second and
            later stages.
        no_split_module_classes: names of classes whose modules are not cut; None takes its
            `_no_split_modules`.
        example_args, example_kwargs: inputs of one micro-batch, by which torch traces the model. Micro-batches of other
            shapes are traced when they come.
        num_chunks: micro-batches per batch; None means one per rank.
        gather_output: whether all ranks get the output; else the last one does, and the others None.

    Raises:
        PlanError: the model cannot be cut or traced so.
        SettingError: num_chunks below 1.

    Cost: tracing takes seconds; each rank keeps the whole model on the CPU and its stage on its device.
    """
    state = PartialState()
    if num_chunks is not None and num_chunks < 1:
        raise SettingError(f"num_chunks={num_chunks} has to be at least 1")
    if state.num_processes == 1:
        model.hf_split_points = [] if split_points == "auto" else list(split_points)  # type: ignore[assignment]
        return model
    if split_points == "auto":
        kept = no_split_module_classes or getattr(model, "_no_split_modules", None) or ()
        device_map = generate_device_map(model, state.num_processes, kept)
        split_points = [_first_on(rank, device_map) for rank in range(1, state.num_processes)]
    elif isinstance(split_points, str):
        raise SettingError(f"split_points={split_points!r}: give a list of names of modules, or 'auto'")
    chunks = num_chunks or state.num_processes
    stages = _Stages(_with_own_forward(model), split_points, chunks)
    with torch.no_grad():
        stages.for_inputs(tuple(example_args or ()), dict(example_kwargs or {}))
    forward = functools.partial(pippy_forward, stages, chunks, gather_output)
    model.hf_split_points = list(split_points)  # type: ignore[assignment] # read by users, as in the peer
    model.forward = functools.update_wrapper(forward, model.forward)
    return model


def _first_on(rank: int, device_map: Mapping[str, int | str]) -> str:
    return next(name for name, device in device_map.items() if device == rank)


def _with_own_forward(model: nn.Module) -> nn.Module:
    """The same modules and weights in an object whose forward stays what it is."""
    view = object.__new__(type(model))
    view.__dict__.update(vars(model))
    return view
