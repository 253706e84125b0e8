"""How many ranks each kind of parallelism gets, and the mesh that follows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_state.errors import PlanError, SettingError
from accel_state.settings import setting

from .axis_handlers import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig
from .mesh_plans import AXES, DATA_AXES, as_arguments, as_product, nearest_plan, places
from .pipeline.config import PipelineConfig

CP_BACKENDS = ("torch",)
SP_BACKENDS = ("native", "deepspeed")


@dataclass
class ParallelismConfig:
    """The sizes of a mesh's axes, whose product is the world size.

    Fields that are None take their ACCEL_PARALLELISM_CONFIG_* variable (or the peer's name for it), else 1.

    Args:
        dp_replicate_size: copies of the model, each with data of its own.
        dp_shard_size: ranks that share one copy's parameters (FSDP), each with data of its own.
        tp_size: ranks that share each matrix.
        cp_size: ranks that share a sequence, whose keys and values travel.
        cp_backend: who carries that out, "torch".
        sp_size: ranks that share a sequence, whose heads are exchanged (Ulysses).
        sp_backend: who carries that out, "native" or "deepspeed"; default "native".
        tp_handler, cp_handler, sp_handler: options of these axes; made with their defaults for axes above 1.
        pp_size: ranks of a pipeline.
        pp_handler: how the model is cut into stages, and their schedule; `PipelineConfig()` by default.

    Raises:
        SettingError: a size below 1, an unknown backend, or cp and sp together.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = None
    pp_handler: Any = None

    def __post_init__(self) -> None:
        for axis in AXES:
            name = f"{axis}_size"
            if getattr(self, name) is None:
                setattr(self, name, setting(f"parallelism_config_{name}") or 1)
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SettingError(f"{name}={size!r} is not a number of ranks: give a whole number of at least 1")
        self.cp_backend = self.cp_backend or setting("parallelism_config_cp_backend") or "torch"
        self.sp_backend = self.sp_backend or setting("parallelism_config_sp_backend") or "native"
        _require_one_of("cp_backend", self.cp_backend, CP_BACKENDS)
        _require_one_of("sp_backend", self.sp_backend, SP_BACKENDS)
        if self.cp_enabled and self.sp_enabled:
            raise SettingError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both share the sequence: set one of them to 1"
            )
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_enabled and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.pp_enabled and self.pp_handler is None:
            self.pp_handler = PipelineConfig()
        self._mesh: DeviceMesh | None = None

    # ---- sizes

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to size, in the mesh's order."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def total_size(self) -> int:
        """The number of ranks that the plan needs."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that the data is cut into."""
        return math.prod(self.sizes[axis] for axis in DATA_AXES)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on the same samples."""
        return self.total_size // self.data_parallel_size

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is cut into stages."""
        return self.sizes["pp"] > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are shared over ranks with data of their own."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether matrices are shared."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are shared by moving keys and values."""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are shared by exchanging heads."""
        return self.sizes["sp"] > 1

    # ---- names of axes

    def _used(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.sizes[axis] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes in use along which ranks have data of their own."""
        return self._used(*DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes in use whose ranks work on the same samples."""
        return self._used("pp", "tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes in use that FSDP shards parameters over."""
        return self._used("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes in use over which the peer averages losses."""
        return self._used(*DATA_AXES, "cp")

    @property
    def loss_dim_names(self) -> list[str]:
        """The axes in use along which ranks see different tokens; gradients are averaged over them, never over tp."""
        return self._used(*DATA_AXES, "cp", "sp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of the mesh that `fully_shard` gets: replicas first, then the flattened axes that share."""
        return [*self._used("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes in use, those with data of their own first."""
        return self.dp_dim_names + self.non_dp_dim_names

    # ---- the plan and the mesh

    def check(self, world_size: int) -> list[str]:
        """What is wrong with this plan on `world_size` ranks, with the nearest plan that fits; empty if it fits."""
        if self.total_size == world_size:
            return []
        near = as_arguments(nearest_plan(self.sizes, world_size))
        return [
            f"the axes need {as_product(self.sizes)} rank{'s' if self.total_size > 1 else ''}, and there "
            f"{'are' if world_size > 1 else 'is'} {world_size}. Nearest plan that fits: ParallelismConfig({near}), or "
            f"start {self.total_size} processes."
        ]

    def explain(self) -> str:
        """The mesh in words, and each rank's place on it."""
        return "\n".join(
            [
                f"mesh of {as_product(self.sizes)} ranks, data cut into {self.data_parallel_size} "
                f"part{'s' if self.data_parallel_size > 1 else ''}",
                places(self.sizes),
            ]
        )

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh over all ranks of the job. Every rank calls it.

        Its axes are those in use, in the order of `AXES`, and dp_shard where FSDP would have none. Besides there are
        `mesh["dp"]`, `mesh["dp_shard_cp"]` (what FSDP shares parameters over), `mesh["dp_cp"]` and `mesh["loss"]`.

        Args:
            device_type: "cuda", "cpu", ...

        Raises:
            PlanError: there is no process group, or the sizes do not fit the world size.

        Cost: makes process groups, a collective each.
        """
        if not dist.is_initialized():
            raise PlanError(
                f"a mesh of {as_product(self.sizes)} needs a process group, and there is none: start the script by a "
                "launcher and create PartialState() or Accelerator() first"
            )
        complaints = self.check(dist.get_world_size())
        if complaints:
            raise PlanError("this mesh cannot be built: " + " ".join(complaints))
        names = [axis for axis in AXES if self.sizes[axis] > 1]
        if "dp_shard" not in names and self._needs_a_shard_axis():
            names.insert(len([name for name in names if AXES.index(name) < AXES.index("dp_shard")]), "dp_shard")
        mesh = init_device_mesh(device_type, tuple(self.sizes[name] for name in names), mesh_dim_names=tuple(names))
        for flat_name, axes in (
            ("dp", DATA_AXES),
            ("dp_shard_cp", ("dp_shard", "cp", "sp")),
            ("dp_cp", (*DATA_AXES, "cp")),
            ("loss", (*DATA_AXES, "cp", "sp")),
        ):
            there = tuple(axis for axis in axes if axis in names)
            if there:
                (mesh if there == tuple(names) else mesh[there])._flatten(flat_name)  # noqa: SLF001 - no public way
        self._mesh = mesh
        return mesh

    def _needs_a_shard_axis(self) -> bool:
        """A mesh has an axis, and that of FSDP ends with one to share over."""
        return self.total_size == 1 or (self.dp_replicate_enabled and not self.cp_enabled and not self.sp_enabled)

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The mesh that was built, or a new one.

        Raises:
            SettingError: there is none yet and no device type to build it for, or it is of another type.
        """
        if self._mesh is None:
            if device_type is None:
                raise SettingError("there is no mesh yet: give device_type, such as 'cuda', to build it")
            return self.build_device_mesh(device_type)
        if device_type is not None and self._mesh.device_type != device_type:
            raise SettingError(
                f"the mesh was built for {self._mesh.device_type!r}, which device_type={device_type!r} cannot change"
            )
        return self._mesh

    get_mesh = get_device_mesh

    def to_json(self) -> str:
        """The fields as JSON; handlers as their fields."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, default=vars)


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingError(f"{name}={value!r} does not exist: use one of {', '.join(allowed)}")
