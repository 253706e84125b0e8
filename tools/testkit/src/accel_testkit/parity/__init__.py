"""The parity table: every strategy through `Accelerator`, against a loop by hand in raw torch on one device."""
