"""Advice to whoever starts a target that is a remote API, and whose first batch failed: by what the API has said."""

from __future__ import annotations

import re

from headway.errors import BackendError, BadOutput, BatchTimeout, RemoteAbsent

_BY_STATUS = {
    401: "It wants a credential, or another one: set HEADWAY_REMOTE_TOKEN or --remote-headers-file.",
    403: "It knows the credential, which may not do this: use one that may, and check --remote-model.",
    404: "It has nothing at this URL: check the path, and --remote-model.",
    405: "It takes no POST at this URL: check the path.",
    407: "A proxy on the way wants a credential.",
    413: "It takes less at once: lower --max-batch-size.",
    429: "It asks for fewer calls: bound them by --remote-rate, and check its quota.",
}
OF_FORM = (400, 415, 422)
"""Statuses of an API that wants another form of a request."""
_ANY = "Check the URL, --remote-format, --remote-model, the credentials and certificates, and that the API is up."
_TOLD = ((r"datatype|tensor", "oip"), (r"messages|prompt", "openai-completions"), (r"inputs", "inputs"), (r"input", "openai-embeddings"))  # fmt: skip
"""Words with which an API names what it misses, and the format whose requests have that."""
_READ = 4096
"""Bytes of an answer that are looked at."""


def advice(error: BackendError, status: int, body: bytes | bytearray) -> str:
    """Sentence on what to look at.

    Arguments:
        error: error of the batch.
        status: HTTP status of the last try; 0 where there was none.
        body: body that came with it.
    """
    if isinstance(error, RemoteAbsent):
        return "No connection came about: check host and port, the certificates, and that the API is up."
    if isinstance(error, BatchTimeout):
        return "Look at whether it hangs; if it only takes long, raise --start-timeout-ms."
    if isinstance(error, BadOutput):
        return "It answers in another form than --remote-format says: check the URL, and set the format."
    if status in OF_FORM:
        named = asked_for(body)
        more = (
            f"its answer names what --remote-format {named} sends: try that"
            if named
            else "check --remote-format, and --remote-model"
        )
        return f"It turned the request down for its form: {more}."
    if 300 <= status < 400:
        return "It sends elsewhere: name the URL to which it leads."
    if status >= 500:
        return "It is in trouble itself: its log tells more."
    return _BY_STATUS.get(status, _ANY)


def asked_for(body: bytes | bytearray) -> str:
    """Name of the format of which an answer misses a member; empty where it tells none."""
    text = bytes(body[:_READ]).decode("latin-1").lower()
    return next((name for words, name in _TOLD if re.search(rf"\b({words})\b", text)), "")
