"""Settings of the launcher itself; the processes that it starts get `RANK` and the like instead."""

from functools import partial

from accel_state.settings.model import Setting, define

_row = partial(define, for_workers=False)

SETTINGS: tuple[Setting, ...] = (
    _row(
        "num_processes",
        int,
        None,
        "Processes in all; one for each accelerator by default, and one without any.",
        minimum=1,
    ),
    _row("multi_gpu", bool, False, "Run on GPUs, one process each; refused without one."),
    _row("tpu", bool, False, "Run on TPUs; refused, their engine does not exist yet."),
    _row("gpu_ids", str, None, "The GPUs to use, as in CUDA_VISIBLE_DEVICES (`0,2`), or `all`."),
    _row(
        "launcher",
        str,
        "auto",
        "Who starts the processes: ours (spawn) on one machine, torch elastic where there are restarts or several.",
        choices=("auto", "spawn", "elastic", "srun", "mpi", "ray", "deepspeed"),
    ),
    _row(
        "num_cpu_threads_per_process",
        int,
        None,
        "OMP_NUM_THREADS of each process; 1 by default when there are several.",
        minimum=1,
    ),
    _row(
        "grace_s",
        int,
        10,
        "Seconds that processes have to end after a signal, or after one of them failed, before they are killed.",
        minimum=0,
    ),
    _row("as_accelerate", bool, False, "Let the script's `import accelerate` find accel, see accel.compat."),
    _row("quiet", bool, False, "Do not repeat the error of the rank that failed first."),
    _row("log_dir", str, None, "Write what each rank prints to files of its own in this folder too."),
    _row("tee", str, "0", "With --log-dir, which streams: 1 stdout, 2 stderr, 0 or 3 both; `0:1,1:3` by local rank."),
    _row("log_prefix", bool, False, "Put `[rank]` in front of each line that a rank prints."),
)

MACHINES: tuple[Setting, ...] = (
    _row("num_machines", int, 1, "Machines in all.", minimum=1),
    _row(
        "min_machines",
        int,
        None,
        "The fewest machines that the job goes on with; all of them by default.",
        minimum=1,
    ),
    _row("machine_rank", int, 0, "This machine's number, from 0.", minimum=0),
    _row("same_network", bool, False, "All machines reach the first one at --main-process-ip; always so here."),
    _row("main_process_ip", str, None, "The host of rank 0; this machine by default."),
    _row(
        "main_process_port",
        int,
        None,
        "The TCP port that the processes meet at; a free one by default.",
        minimum=0,
        maximum=65535,
    ),
    _row(
        "rdzv_backend",
        str,
        None,
        "How machines find each other: static, c10d or etcd-v2; static by default, c10d where there are restarts.",
        choices=("static", "c10d", "etcd", "etcd-v2"),
    ),
    _row("rdzv_conf", str, None, "More for that rendezvous, `key=value,...`."),
    _row("rdzv_id", str, None, "The name of the job at that rendezvous."),
    _row("role", str, "default", "The name of the processes' role."),
    _row("max_restarts", int, 0, "How often all processes are started again after one failed.", minimum=0),
    _row("monitor_interval", float, 0.1, "Seconds between looks at the processes, where they can be restarted."),
    _row(
        "mpirun_hostfile",
        str,
        None,
        "Start the processes by mpirun, on these hosts.",
        yaml="mpirun_config.mpirun_hostfile",
    ),
    _row("mpirun_ccl", int, None, "Worker threads of oneCCL under mpirun.", flags=(), yaml="mpirun_config.mpirun_ccl"),
    *(
        _row(f"deepspeed_{key}", str, None, doc, yaml=f"deepspeed_config.deepspeed_{key}")
        for key, doc in (
            ("hostfile", "The hosts of DeepSpeed's own launcher."),
            ("exclusion_filter", "Hosts and GPUs that it leaves out."),
            ("inclusion_filter", "Hosts and GPUs that it uses alone."),
            (
                "multinode_launcher",
                "What it starts them by: pdsh, openmpi, slurm, ...; standard leaves it out.",
            ),
        )
    ),
)

TPU: tuple[Setting, ...] = (
    _row(
        "tpu_use_cluster",
        bool,
        False,
        "Run on a pod of TPUs.",
        flags=("--tpu-cluster", "--tpu_cluster"),
    ),
    _row("tpu_use_sudo", bool, False, "Run as root there."),
    _row("main_training_function", str, None, "The function of the script that TPU processes run."),
)
