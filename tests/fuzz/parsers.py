"""Every parser of external input, with its promise: it only raises documented errors, and what it accepts is valid.
A parser is a function of bytes that raises AssertionError, or anything else, when its promise is broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.fuzz import bulk, credentials, dearest_calls, dearest_forms, doors, frames, requests, tensors, wire
from tests.fuzz.mutation import Codec, Mutator


@dataclass(frozen=True)
class Parser:
    """A parser to fuzz. `check` feeds it one input.
    `weight` is its relative number of inputs. `slow` limits the processor seconds for one. `draw` makes new inputs."""

    name: str
    check: Callable[[bytes], None]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    codec: Codec | None = None
    weight: float = 1
    draw: Callable[[random.Random], bytes] | None = None
    slow: float = 1.0

    def inputs(self, seed: int) -> Iterator[bytes]:
        """Yield endless inputs, the same for the same seed."""
        if self.draw is not None:
            rng = random.Random(f"{seed} {self.name}")
            while True:
                yield self.draw(rng)
        mutator = Mutator(self.seeds, self.words, f"{seed} {self.name}", self.codec)
        while True:
            yield mutator.next()


JSON = Codec(json.loads, lambda tree: json.dumps(tree).encode())
MSGPACK = Codec(msgspec.msgpack.decode, msgspec.msgpack.encode)
REPLY = Codec(wire.unpacked_fields, wire.packed_fields)


def parsers(folder: Path) -> list[Parser]:
    """Return the parsers to fuzz. Those that read files do so in the folder."""
    issuers, keys = credentials.Files(folder / "issuers.toml"), credentials.Files(folder / "keys.toml")
    files = doors.Files(folder)
    return [
        Parser("request head", requests.check_head, requests.HEADS, requests.HEAD_WORDS),
        Parser("header values", requests.check_values, requests.VALUES, requests.VALUE_WORDS),
        Parser("chunked body", requests.check_chunks, requests.CHUNKED, requests.CHUNK_WORDS),
        Parser("native bodies", requests.check_body, requests.BODIES, requests.BODY_WORDS),
        Parser("bodies of OpenAI's", doors.check_openai, doors.OPENAI, doors.OPENAI_WORDS, JSON, weight=4),
        Parser("bodies with a tensor", tensors.check_tensor, tensors.BODIES, tensors.BODY_WORDS, weight=4),
        Parser("gRPC messages", doors.check_grpc, doors.GRPC, doors.GRPC_WORDS, weight=4),
        Parser(
            "expensive gRPC messages",
            dearest_calls.check,
            (),
            weight=0.2,
            draw=dearest_calls.draw,
            slow=dearest_calls.SLOW,
        ),
        Parser("frames of HTTP/2", frames.check_frames, frames.FRAMES, frames.FRAME_WORDS),
        Parser("answer of a remote API", doors.check_answer, doors.ANSWERS, doors.ANSWER_WORDS, weight=4),
        Parser("chat template", files.check_template, doors.TEMPLATES, doors.TEMPLATE_WORDS),
        Parser("file of an input policy", files.check_policy, doors.POLICIES, doors.POLICY_WORDS),
        Parser("form with a file", bulk.check_form, bulk.FORMS, bulk.FORM_WORDS),
        Parser("expensive forms", dearest_forms.check, dearest_forms.SEEDS, weight=0.1),
        Parser("line of a bulk job", bulk.check_line, bulk.LINES, bulk.LINE_WORDS, JSON),
        Parser("compressed body", tensors.check_compressed, tensors.COMPRESSED, tensors.COMPRESSED_WORDS),
        Parser("API key", credentials.check_key, credentials.KEYS, credentials.KEY_WORDS),
        Parser("token", credentials.check_token, credentials.TOKENS, credentials.TOKEN_WORDS),
        Parser("signed claims", credentials.check_claims, credentials.CLAIMS, credentials.CLAIM_WORDS, JSON),
        Parser("key set", credentials.check_jwks, credentials.KEY_SETS, credentials.KEY_SET_WORDS, JSON),
        Parser("file of issuers", issuers.check_issuers, credentials.ISSUERS, credentials.TOML_WORDS),
        Parser("file of keys", keys.check_keys, credentials.KEY_FILES, credentials.TOML_WORDS),
        Parser("entry in Redis", wire.check_entry, wire.ENTRIES, wire.WORDS, MSGPACK),
        Parser("dead letter in Redis", wire.check_letter, wire.LETTERS, wire.WORDS),
        Parser("reply in Redis", wire.check_reply, wire.REPLIES, wire.WORDS, REPLY),
        Parser("registry in Redis", wire.check_registry, wire.REGISTRY, wire.WORDS),
    ]
