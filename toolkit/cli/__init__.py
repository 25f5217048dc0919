"""The command line: one file a command, registered in `main`."""
