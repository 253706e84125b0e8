"""What follows from a process's place, for the states that know it."""

from __future__ import annotations

from accel_state.enums import DistributedType


class ProcessFacts:
    """Base of the states: answers that are derived from the place, and kept nowhere."""

    num_processes: int
    process_index: int
    local_process_index: int
    distributed_type: DistributedType

    @property
    def use_distributed(self) -> bool:
        """Whether there are peers to talk to."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Rank 0 of this machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """The highest rank."""
        return self.process_index == self.num_processes - 1
