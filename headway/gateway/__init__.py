"""The gateway: the client's side of a request, from submission to answer. Start with `gateway` and `pending`."""
