"""The HTTP/1.1 server: ports, connections, and limits on what a client can cost. `connection` is where to begin."""
