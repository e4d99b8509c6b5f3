"""The HTTP/1.1 server: ports, connections, and limits on the cost of each client. Start reading at `connection`."""
