"""How does a policy handle traffic? In virtual time, without processes or sockets."""
