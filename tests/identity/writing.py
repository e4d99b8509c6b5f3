"""API keys for tests, as strings and as entries of a file."""

import string

from headway.identity.api_keys.credential import LIVE, NOISE, digest, generate, parse

_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def key_of(name: str) -> str:
    """Return the key for a name of letters and digits. Its secret contains `canary`, its id doesn't."""
    drawn = f"{name:0<12.12}{'canary' + name:0<22.22}"
    number = 0
    for digit in drawn:
        number = number * 62 + _DIGITS.index(digit)
    text = generate(LIVE, number.to_bytes(NOISE))
    assert drawn[12:] in text
    return text


def id_of(name: str) -> str:
    found = parse(key_of(name).encode())
    assert found is not None
    return found[0]


def digest_of(name: str) -> bytes:
    found = parse(key_of(name).encode())
    assert found is not None
    return digest(found[1])


def entry(name: str, user: str = "ada", tenant: str = "acme", tier: str = "paid", more: str = "") -> str:
    return (
        f'[[keys]]\nid = "{id_of(name)}"\nsha256 = "{digest_of(name).hex()}"\nuser = "{user}"\ntenant = "{tenant}"\n'
        f'tier = "{tier}"\n{more}\n'
    )
