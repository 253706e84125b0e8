"""`python -m accel_launch`: the `accel` command."""

from accel_launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
