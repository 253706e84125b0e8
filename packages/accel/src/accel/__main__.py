"""`python -m accel`: the same as the `accel` command."""

import sys

from accel_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
