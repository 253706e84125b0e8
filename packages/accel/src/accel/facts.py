"""`Facts`: the properties of an `Accelerator` that only say how its run is set up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import accel_parallel
import accel_precision

from . import parallelism

if TYPE_CHECKING:
    import torch

    from accel_ckpt import ProjectConfiguration
    from accel_data import DataLoaderConfiguration
    from accel_parallel import AcceleratedOptimizer, ParallelismConfig
    from accel_precision import FP8BackendType, PrecisionPolicy
    from accel_state import AcceleratorState, DistributedType, GradientState


class Facts:
    """Who runs where and by which settings, read off the parts that `Accelerator` is made of."""

    state: AcceleratorState
    gradient_state: GradientState
    policy: PrecisionPolicy
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _optimizers: list[AcceleratedOptimizer]

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are peers to talk to."""
        return self.state.use_distributed

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the mesh's axes; None where all ranks lie on one data axis."""
        config: ParallelismConfig | None = self.state.parallelism_config
        return config

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh that `parallelism_config` describes, or None."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether sharding can be combined with the other axes of a mesh."""
        return self.is_fsdp2

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those with data of their own."""
        return parallelism.rank_along(self.state, "dp_replicate", "dp_shard")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place among those that share one copy's parameters."""
        return parallelism.rank_along(self.state, "dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among those that share each matrix."""
        return parallelism.rank_along(self.state, "tp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's place among those that share a sequence by `cp`."""
        return parallelism.rank_along(self.state, "cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in its pipeline."""
        return parallelism.rank_along(self.state, "pp")

    @property
    def multi_device(self) -> bool:
        """Whether several processes train together, each on a device of its own."""
        return self.use_distributed and self.distributed_type.name.startswith("MULTI_")

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16", "bf16" or "fp8"."""
        return self.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Which library computes in 8-bit floats; NO without "fp8"."""
        backend = self.policy.fp8
        return accel_precision.FP8BackendType.NO if backend is None else backend.kind

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends its accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)  # noqa: SLF001  the peer's name, part of the contract

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        plugin = accel_parallel.GradientAccumulationPlugin(num_steps=num_steps)  # refuses what is not allowed
        self.gradient_state.plugin_kwargs["num_steps"] = plugin.num_steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer left its last step out because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def project_dir(self) -> str | None:
        """Where the run writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number that the next automatically named checkpoint gets."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """Of `dataloader_config`."""
        return self.dataloader_config.split_batches

    @property
    def should_save_model(self) -> bool:
        """Whether this rank has whole parameters that a caller may write by its own means.

        False on ranks but 0 where a model is cut along `tp` or `pp`. `save_model` itself is called on every rank.
        """
        config = self.parallelism_config
        is_cut = config is not None and (config.tp_enabled or config.pp_enabled)
        return self.is_main_process or not is_cut

    @property
    def dispatch_batches(self) -> bool | None:
        """Of `dataloader_config`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Of `dataloader_config`."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Of `dataloader_config`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Of `dataloader_config`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Of `dataloader_config`."""
        return self.dataloader_config.use_stateful_dataloader
