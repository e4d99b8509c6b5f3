"""A GPU worker: a child process that runs the user's function."""
