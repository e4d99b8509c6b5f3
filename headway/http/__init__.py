"""The HTTP ports: the HTTP/1.1 server, inference routes (which the connection serves itself), and ordinary routes."""
