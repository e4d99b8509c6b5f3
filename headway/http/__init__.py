"""HTTP ports: the HTTP/1.1 server, inference routes on the connection itself, and ordinary routes."""
