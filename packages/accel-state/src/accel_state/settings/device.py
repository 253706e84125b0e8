"""Settings of the process: its device and its process group."""

from accel_state.settings.model import Setting, define

SETTINGS: tuple[Setting, ...] = (
    define(
        "cpu",
        bool,
        False,
        "Ignore every accelerator and run on the CPU.",
        env="ACCEL_USE_CPU",
        yaml="use_cpu",
    ),
    define("torch_device", str, None, "The device to use, as torch names it (`cuda:1`); found by default.", flags=()),
    define(
        "cpu_affinity",
        bool,
        False,
        "Keep each process on the cores that are next to its GPU; warns where that cannot be.",
        flags=("--enable-cpu-affinity", "--enable_cpu_affinity"),
        yaml="enable_cpu_affinity",
    ),
    define("downcast_bf16", bool, False, "On TPU: bfloat16 for float32, and float32 for float64."),
    define(
        "process_group_timeout_s",
        int,
        None,
        "Seconds that a collective may take before it fails; torch's own by default.",
        flags=(),
        minimum=1,
    ),
)
