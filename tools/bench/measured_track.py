"""One measurement of bench_track: what `Accelerator.log` of 20 numbers costs the training thread, in µs.

The median of single calls, so that whatever else the machine does hits few of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time

from accel import Accelerator

CALLS = 5000
WARM_UP_CALLS = 200


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("bench")
        values = {f"group/value_{index}": index / 7 for index in range(20)}
        times = []
        for step in range(WARM_UP_CALLS + CALLS):
            start = time.perf_counter_ns()
            accelerator.log(values, step=step)
            times.append((time.perf_counter_ns() - start) / 1000)
        accelerator.end_training()
    print(statistics.median(times[WARM_UP_CALLS:]))


if __name__ == "__main__":
    main()
