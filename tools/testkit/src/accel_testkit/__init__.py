"""Material for accel's own tests; never released."""
