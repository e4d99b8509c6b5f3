"""Backends run models: `process` in a child process; `http` and `grpc`, which share `remote`, through a remote API."""
