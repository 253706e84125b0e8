import subprocess
import sys

import accel_parallel


def test_importing_the_package_does_not_import_torch():
    code = "import sys, accel_parallel; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    for name in accel_parallel.__all__:
        assert getattr(accel_parallel, name) is not None
    assert set(accel_parallel.__all__) <= set(dir(accel_parallel))
