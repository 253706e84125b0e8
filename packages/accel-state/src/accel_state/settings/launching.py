"""Settings of the launcher itself; the processes that it starts get `RANK` and the like instead."""

from accel_state.settings.model import Setting, define

SETTINGS: tuple[Setting, ...] = (
    define(
        "num_processes",
        int,
        None,
        "Processes in all; one for each accelerator by default, and one without any.",
        minimum=1,
        for_workers=False,
    ),
    define("multi_gpu", bool, False, "Run on GPUs, one process each; refused without one.", for_workers=False),
    define(
        "gpu_ids",
        str,
        None,
        "The GPUs to use, as in CUDA_VISIBLE_DEVICES (`0,2`), or `all`.",
        for_workers=False,
    ),
    define("num_machines", int, 1, "Machines in all.", minimum=1, for_workers=False),
    define("machine_rank", int, 0, "This machine's number, from 0.", minimum=0, for_workers=False),
    define("main_process_ip", str, None, "The host of rank 0; this machine by default.", for_workers=False),
    define(
        "main_process_port",
        int,
        None,
        "The TCP port that the processes meet at; a free one by default.",
        minimum=0,
        maximum=65535,
        for_workers=False,
    ),
    define(
        "num_cpu_threads_per_process",
        int,
        None,
        "OMP_NUM_THREADS of each process; 1 by default when there are several.",
        minimum=1,
        for_workers=False,
    ),
    define(
        "grace_s",
        int,
        10,
        "Seconds that processes have to end after a signal, or after one of them failed, before they are killed.",
        minimum=0,
        for_workers=False,
    ),
    define(
        "as_accelerate",
        bool,
        False,
        "Let the script's `import accelerate` find accel, see accel.compat.",
        for_workers=False,
    ),
)
