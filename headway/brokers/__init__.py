"""Where entries wait: in this process (`memory`) or in a server that many share (`redis`)."""
