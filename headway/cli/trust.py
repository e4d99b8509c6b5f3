"""TLS of commands that call a service: whom they trust, and which certificate they show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.cli.commands import combined, option
from headway.cli.own_process import first_certificate
from headway.errors import SettingError

if TYPE_CHECKING:
    import ssl

trusting = combined((
    option("--ca", default="", metavar="FILE", envvar="HEADWAY_CA",
        help="Authorities to trust at https://; if left out: those of SSL_CERT_FILE, or of the system."),
    option("--cert", default="", metavar="FILE", envvar="HEADWAY_CERT", help="Certificate to show, where the service asks for one."),
    option("--cert-key", default="", metavar="FILE", envvar="HEADWAY_CERT_KEY", help="Its key; if left out: in the file of --cert."),
))  # fmt: skip
"""Options of a command that calls over TLS: `ca`, `cert` and `cert_key`."""

AUTHORITY = "--ca, or by SSL_CERT_FILE"
SHOWN = "--cert"


def make_context(ca: str, cert: str, cert_key: str, own: str = "") -> ssl.SSLContext:
    """Make a client's TLS context. Raises SettingError if a file is unusable.

    `ca` is a file of authorities to trust; empty for the system's. Or, with `own`, the certificate file of a process on this host,
    that alone is trusted, whatever its name. `cert` is a certificate to show, or empty; `cert_key`, its key, is empty if `cert`
    holds it.
    """
    import ssl

    try:
        context = _trusting_only(own) if own and not ca else ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as exc:
        raise SettingError("--ca", ca, _why(exc), "Name a file of certificates in PEM format.") from None

    def refuse_encrypted() -> str:
        name, file = ("--cert-key", cert_key) if cert_key else ("--cert", cert)
        raise SettingError(name, file, "is encrypted", "Decrypt it with openssl pkey -in FILE -out KEY.")

    if cert_key and not cert:
        raise SettingError("--cert-key", cert_key, "has no effect without --cert", "Name the certificate as well.")
    if cert:
        try:
            context.load_cert_chain(cert, cert_key or None, refuse_encrypted)
        except (OSError, ValueError) as exc:
            hint = "Name a certificate and its key, in PEM format."
            raise SettingError("--cert", cert, f"{_why(exc)} (with its key {cert_key or cert})", hint) from None
    return context


def _trusting_only(file: str) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cadata=first_certificate(file))
    context.check_hostname = False  # This host's own process, at an address that the certificate may not name.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # Trust the certificate itself, not its issuer.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _why(exc: Exception) -> str:
    import ssl

    if isinstance(exc, ssl.SSLError):
        return f"cannot be used: {(exc.reason or 'no PEM').lower().replace('_', ' ')}"
    return f"cannot be read: {getattr(exc, 'strerror', None) or exc}"
