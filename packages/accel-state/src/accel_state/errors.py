"""Every exception that accel raises on purpose.

Each also inherits the builtin that callers would expect (`ValueError`, `RuntimeError`, …), so code that catches the
builtin keeps working. Messages say what was wrong, the value, what is allowed and what to do.
"""

from __future__ import annotations


class AccelError(Exception):
    """Base of all errors that accel raises on purpose."""


# ---- settings and topology


class SettingError(AccelError, ValueError):
    """An argument, flag, file entry or environment variable has a value that is not allowed."""


class TopologyError(AccelError, ValueError):
    """The launcher's variables contradict each other or are incomplete."""


class DeviceError(AccelError, ValueError):
    """A device kind or index that does not exist here was asked for."""


class MissingExtraError(AccelError, ImportError):
    """An optional library is needed; the message names the extra that brings it."""


# ---- process state and communication


class StateResetError(AccelError, AttributeError):
    """A handle was used after the state behind it was reset."""


class NoAcceleratorError(AccelError, ValueError):
    """The state of the current Accelerator was asked for, and there is none."""


class ProcessGroupError(AccelError, RuntimeError):
    """The process group cannot be made, or is no longer usable."""


class CollectiveMismatchError(AccelError, RuntimeError):
    """The ranks did not call the same collective with matching data."""


DistributedOperationException = CollectiveMismatchError
"""The peer's name for it."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was to be padded; it is returned as it is."""


class BatchSizeError(AccelError, RuntimeError):
    """No batch size that was tried fits into memory."""


class RankFailedError(AccelError, RuntimeError):
    """One of the processes that we started failed; the message holds its traceback."""


class LaunchError(AccelError, RuntimeError):
    """A launch could not be planned or did not succeed."""


# ---- data


class DataLoaderError(AccelError, ValueError):
    """A loader cannot be prepared or cut as asked."""


class DataStateError(AccelError, ValueError):
    """A saved position does not fit the loader that it is loaded into."""


# ---- preparation


class PlanError(AccelError, ValueError):
    """The steps of a plan do not fit together, the model, or the hardware."""


class NotPreparedError(AccelError, ValueError):
    """An object has to go through `prepare` first."""


class DeviceMapError(AccelError, ValueError):
    """A device map, or a request to put tensors somewhere, does not fit the model or the machine."""


class OffloadError(AccelError, RuntimeError):
    """Offloaded weights cannot be written, read, or used in this way."""


class OffloadFolderError(OffloadError, OSError):
    """A folder of offloaded weights cannot be written, or a file of it cannot be read."""


class PrecisionError(AccelError, ValueError):
    """A precision that is unknown or that this hardware cannot run was asked for."""


# ---- checkpoints


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError, ValueError):
    """There is no committed checkpoint at the place that was named."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, truncated or altered."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint and the objects that it is loaded into do not fit; the message lists the differences."""


# ---- tracking


class TrackerError(AccelError, ValueError):
    """A tracker that is unknown, not installed or not usable as asked was named."""


# ---- the name `accelerate`


class AliasError(AccelError, ImportError):
    """`accelerate` cannot be answered by accel, or a name of it is not offered yet."""
