"""Code that HTTP and gRPC share: authenticating and reading requests, writing large answers, and readiness."""
