"""Fresh API keys, and the file by which a service knows them."""

from __future__ import annotations

import secrets
from pathlib import Path

from headway.identity import api_key


def write_keys(path: Path, *tenants: str, more: str = "") -> list[str]:
    """The texts of one key for each tenant; `more` is written to each as lines of TOML."""
    texts, rows = [], []
    for tenant in tenants:
        text = api_key.generate(api_key.LIVE, secrets.token_bytes(api_key.NOISE))
        parsed = api_key.parse(text.encode())
        assert parsed is not None
        id, secret = parsed
        rows.append(
            f'[[keys]]\nid = "{id}"\nsha256 = "{api_key.digest(secret).hex()}"\n'
            f'user = "u"\ntenant = "{tenant}"\ntier = "paid"\n{more}\n'
        )
        texts.append(text)
    path.write_text("\n".join(rows))
    return texts
