"""What ``tools/dev`` does, one module per command. Standard library only, except where a module says otherwise."""
