"""Backends, which run models: `process` in a child process, `http` and `grpc` at a remote API, which share `remote`."""
