"""Shard any PyTorch DataLoader exactly, and resume it at any batch."""

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from .adapter import DataLoaderAdapter as DataLoaderAdapter
    from .config import DataLoaderConfiguration as DataLoaderConfiguration
    from .digest import SampleDigest as SampleDigest
    from .dispatch import DataLoaderDispatcher as DataLoaderDispatcher
    from .loader import DataLoaderShard as DataLoaderShard
    from .mailbox import DataLoaderStateMixin as DataLoaderStateMixin
    from .mesh import DataPlace as DataPlace
    from .mesh import data_place as data_place
    from .metrics import gather_for_metrics as gather_for_metrics
    from .metrics import weighted_mean as weighted_mean
    from .order_shard import OrderShard as OrderShard
    from .permutation import PermutationSampler as PermutationSampler
    from .permutation import SampleOrder as SampleOrder
    from .prefetch import DevicePrefetcher as DevicePrefetcher
    from .prepare import prepare_data_loader as prepare_data_loader
    from .samplers import SeedableRandomSampler as SeedableRandomSampler
    from .samplers import SkipBatchSampler as SkipBatchSampler
    from .samplers import get_sampler as get_sampler
    from .shard import BatchSamplerShard as BatchSamplerShard
    from .skip import SkipDataLoader as SkipDataLoader
    from .skip import skip_first_batches as skip_first_batches
    from .stream import IterableDatasetShard as IterableDatasetShard
    from .uneven import uneven_inputs as uneven_inputs
    from .xla import MpDeviceLoaderWrapper as MpDeviceLoaderWrapper

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "prepare": ["prepare_data_loader"],
        "loader": ["DataLoaderShard"],
        "adapter": ["DataLoaderAdapter"],
        "digest": ["SampleDigest"],
        "prefetch": ["DevicePrefetcher"],
        "dispatch": ["DataLoaderDispatcher"],
        "mailbox": ["DataLoaderStateMixin"],
        "skip": ["skip_first_batches", "SkipDataLoader"],
        "mesh": ["DataPlace", "data_place"],
        "metrics": ["gather_for_metrics", "weighted_mean"],
        "config": ["DataLoaderConfiguration"],
        "shard": ["BatchSamplerShard"],
        "uneven": ["uneven_inputs"],
        "xla": ["MpDeviceLoaderWrapper"],
        "stream": ["IterableDatasetShard"],
        "permutation": ["SampleOrder", "PermutationSampler"],
        "order_shard": ["OrderShard"],
        "samplers": ["SeedableRandomSampler", "SkipBatchSampler", "get_sampler"],
    },
)
