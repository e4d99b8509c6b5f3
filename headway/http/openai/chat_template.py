"""Templates of chats: the messages of a conversation to the one text that a model takes.

`plain` writes a line `role: content` for each message, and `assistant:` at the end. A file holds a Jinja template as models
on the Hugging Face Hub have them. It runs in Jinja's sandbox, where it can read the messages, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from headway.config.extras import install_hint
from headway.core.json_pages import Steps
from headway.errors import BadRequest, SettingError

PLAIN = "plain"
"""Setting of the template that is no file."""

Message = dict[str, str]
"""Message with `role`, `content`, and perhaps `name`."""

Render = Callable[[Sequence[Message]], str]
"""Function from messages to text. Raises BadRequest for messages that a template does not take."""

RenderInSteps = Callable[[Sequence[Message]], Steps[str]]
"""The same of a long conversation, in steps."""

_SETTING = "chat_template"
_LINE = "{role}: {content}\n".format_map
_ALWAYS = {"add_generation_prompt": True, "bos_token": "", "eos_token": ""}
_PIECES = 64
"""Pieces of a text that are rendered between two yields."""


def load_template(chosen: str) -> Render:
    """Load the template that the setting names.

    Raises:
        SettingError: the file cannot be read, is no template, or Jinja is not installed.
    """
    template = _load(chosen)
    if template is None:
        return _plain

    def render(messages: Sequence[Message]) -> str:
        try:
            return str(template.render(messages=messages, **_ALWAYS))
        except Exception as exc:
            raise _not_taken(exc) from None

    return render


def load_long_template(chosen: str) -> RenderInSteps:
    """Load a template for long conversations, of which a little is rendered at a time; see `load_template`."""
    template = _load(chosen)

    def render(messages: Sequence[Message]) -> Steps[str]:
        if template is None:
            return _plain(messages)
        pieces: list[str] = []
        try:
            for piece in template.generate(messages=messages, **_ALWAYS):
                pieces.append(piece)
                if len(pieces) % _PIECES == 0:
                    yield 0
        except Exception as exc:
            raise _not_taken(exc) from None
        return "".join(pieces)

    return render


def _not_taken(exc: Exception) -> BadRequest:
    return BadRequest(f"the chat template does not take these messages: {exc} - at `$.messages`")


def _load(chosen: str) -> Any:
    """Template of Jinja's; None for the one that is no file. Raises SettingError."""
    if chosen == PLAIN:
        return None
    try:
        source = Path(chosen).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise _unusable(chosen, f"cannot be read: {exc}", f"Name a file, or {PLAIN}.") from exc
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as exc:
        raise _unusable(chosen, "needs Jinja, which is not installed", install_hint("chat")) from exc
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as exc:
        raise _unusable(chosen, f"is no Jinja template: {exc}", "Mend the file.") from exc
    except RecursionError:
        raise _unusable(chosen, "nests too deep for a Jinja template", "Mend the file.") from None


def _plain(messages: Sequence[Message]) -> str:
    return "".join(map(_LINE, messages)) + "assistant:"


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _as_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _unusable(chosen: str, reason: str, hint: str) -> SettingError:
    return SettingError(_SETTING, chosen, reason, hint)
