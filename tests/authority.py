"""A certificate authority within this process, for TLS tests."""

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


class Authority:
    """A certificate authority that nothing else trusts. `file` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        own = _builder(self._name, self._name, self._key.public_key(), 30)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def issue(
        self,
        name: str = "service",
        days: float = 30,
        key: rsa.RSAPrivateKey | None = None,
        password: bytes | None = None,
    ) -> tuple[Path, Path]:
        """Return the files of a certificate for 127.0.0.1 and localhost, and of its key, encrypted if there is a password."""
        own: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey = key or ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        signed = _builder(_named(name), self._name, own.public_key(), days).add_extension(names, critical=False)
        certificate, file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        form = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        file.touch(0o600)
        file.write_bytes(own.private_bytes(PEM, serialization.PrivateFormat.PKCS8, form))
        return certificate, file

    def trust(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority, and shows a client certificate if one is given."""
        context = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            context.load_cert_chain(*shown)
        return context


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    ends = datetime.now(UTC) + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - timedelta(days=90))
        .not_valid_after(ends)
    )
