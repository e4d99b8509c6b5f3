"""Words for what is wrong in TLS towards a remote API, and how to mend it: the same over HTTP and gRPC."""

SHOWN = "the TLS handshake failed"
"""The part of an explanation that clients read."""
NO_CERTIFICATE = "it asks for a certificate. Name one with remote_cert"
ANOTHER_CERTIFICATE = "Show one of an authority that it knows, which has not ended"
"""Mend of a certificate that the API refuses."""
NO_TLS = "it does not speak TLS on this port. Write {scheme}:// in its URL, or name the port that does"


def another_host(why: str) -> str:
    """Explain a certificate of another host."""
    return f"its certificate is of another host: {why}. Write a name in the URL that its certificate has"


def not_now(why: str) -> str:
    """Explain a certificate that is not valid at this time."""
    return f"its certificate is not valid now: {why}. Have it renewed there, and look at this machine's clock"


def not_trusted(why: str) -> str:
    """Explain a certificate of an authority that is not known."""
    return f"its certificate is not trusted: {why}. Name the authority that issued it with remote_ca"
