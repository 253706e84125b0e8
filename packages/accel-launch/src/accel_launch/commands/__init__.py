"""One module per subcommand of `accel`."""
