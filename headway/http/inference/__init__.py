"""The inference routes, answered on the connection itself."""
