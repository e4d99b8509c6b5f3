"""Backends, which run models: `process` in a child process; `http` and `grpc`, which share `remote`, at a remote API."""
