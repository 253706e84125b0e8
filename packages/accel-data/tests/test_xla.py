"""The wrapper for torch_xla, with a stand-in for its loader: no XLA device is needed."""

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import MpDeviceLoaderWrapper, prepare_data_loader
from accel_state.errors import MissingExtraError

PLACES = ("torch_xla", "torch_xla.distributed", "torch_xla.distributed.parallel_loader")


@pytest.fixture
def loader():
    return prepare_data_loader(DataLoader(torch.arange(6), batch_size=2), num_processes=1, process_index=0)


def test_batches_go_through_torch_xla_and_all_else_is_the_loaders(monkeypatch, loader):
    class MpDeviceLoader:
        def __init__(self, dataloader, device):
            self.dataloader, self.device = dataloader, device

        def __iter__(self):
            return ((self.device, batch.tolist()) for batch in self.dataloader)

    modules = {name: ModuleType(name) for name in PLACES}
    modules[PLACES[-1]].MpDeviceLoader = MpDeviceLoader
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    wrapped = MpDeviceLoaderWrapper(loader, torch.device("cpu"))
    assert [values for _, values in wrapped] == [[0, 1], [2, 3], [4, 5]]
    assert (len(wrapped), wrapped.total_batch_size, wrapped.end_of_dataloader) == (3, 2, True)
    wrapped.set_epoch(4)
    assert copy.copy(wrapped).iteration == loader.iteration == 4


def test_without_torch_xla_it_says_what_to_install(monkeypatch, loader):
    for name in PLACES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="pip install torch_xla"):
        MpDeviceLoaderWrapper(loader, torch.device("cpu"))
