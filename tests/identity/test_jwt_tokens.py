"""Authentication by token: what is accepted and refused, and how that changes over time."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs

from headway.config import Settings
from headway.errors import SERVICE_OVERLOADED, RequestError, Unauthenticated
from headway.identity.jwt import tokens
from headway.identity.jwt.issuers import ALGORITHMS, Issuer
from headway.identity.jwt.keysets import AGAIN, KeySet
from headway.identity.jwt.tokens import MAX_TOKEN, Tokens
from headway.identity.principals import CombinedIdentity
from headway.model import Principal
from tests.identity.issuing import ISSUER, NOW, Shelf, bearer, claims, issuer, jwk, jwks, private_key, token

SETTINGS = Settings()


class World:
    """Tokens from issuers whose keys are on a shelf, and a clock."""

    def __init__(self, *issuers: Issuer, keys: bytes | str = "down", most: int = 100) -> None:
        self.now = NOW
        self.monotonic = 0.0
        self.shelf = Shelf(keys)
        self.keysets = [KeySet(one, self.shelf, lambda: self.monotonic) for one in issuers]
        self.tokens = Tokens(self.keysets, SETTINGS, lambda: self.now, most)
        self.refresh()

    def refresh(self) -> None:
        async def all_of_them() -> None:
            for keyset in self.keysets:
                await keyset.refresh()

        asyncio.run(all_of_them())

    def principal(self, text: bytes) -> Principal | None:
        return self.tokens.identify(bearer(text))

    def accepted(self, text: bytes) -> Principal:
        found = self.principal(text)
        assert found is not None
        return found

    def why_not(self, text: bytes) -> str:
        with capture_logs() as logs:
            assert self.principal(text) is None
        (line,) = logs
        assert line["log_level"] == "debug"
        return str(line["reason"])


@pytest.fixture
def world() -> World:
    return World(issuer("ES256"), keys=jwks(jwk("ES256"), jwk("RS256", "rsa")))


def encoded(part: Mapping[str, Any] | bytes) -> bytes:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def signed(header: Mapping[str, Any] | bytes, payload: Mapping[str, Any] | bytes) -> bytes:
    body = encoded(header) + b"." + encoded(payload)
    algorithm = jwt.algorithms.get_default_algorithms()["ES256"]
    return body + b"." + encoded(algorithm.sign(body, private_key("ES256")))


GOOD = {"alg": "ES256", "typ": "JWT", "kid": "first"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_good_token_says_who_asks(algorithm: str) -> None:
    world = World(issuer(algorithm), keys=jwks(jwk(algorithm)))
    principal = world.accepted(token(algorithm))
    assert (principal.user, principal.tenant, principal.tier) == ("ada", "acme", 1)
    assert (principal.key, principal.models) == ("", frozenset())
    assert [limit.name for limit in principal.limits] == ["user"]
    assert world.principal(token(algorithm, aud=["other", "headway"])) == principal
    assert world.principal(token(algorithm, header={})) == principal, "the only key needs no id"
    assert world.tokens.identify(b"bEARER   " + token(algorithm) + b" ") == principal


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signature_of_another_key_or_over_another_text_is_not_good(algorithm: str) -> None:
    world = World(issuer(algorithm), keys=jwks(jwk(algorithm)))
    assert "signature" in world.why_not(token(algorithm, "other", header={"kid": "first"}))
    head, body, signature = token(algorithm).split(b".")
    assert "signature" in world.why_not(b".".join((head, encoded(claims(sub="eve")), signature)))
    assert "signature" in world.why_not(b".".join((head, body, encoded(b"x"))))
    assert "signature" in world.why_not(b".".join((head, body, encoded(bytes(64)))))


def confusions() -> Iterator[tuple[str, bytes]]:
    """Yield tokens that would be valid if their header were trusted."""
    public = private_key("ES256").public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    for name in ("none", "None", "NONE", ""):
        yield f"alg {name!r}", encoded({"alg": name, "kid": "first"}) + b"." + encoded(claims()) + b".AA"
    yield "no alg", encoded({"kid": "first"}) + b"." + encoded(claims()) + b".AA"
    for name, secret in (("PEM", pem), ("DER", der), ("JWK", jwks(jwk("ES256"))), ("nothing", b"")):
        body = encoded({"alg": "HS256", "kid": "first"}) + b"." + encoded(claims())
        yield f"HS256 with {name}", body + b"." + encoded(hmac.digest(secret, body, hashlib.sha256))
    yield "RS256 by a key of the same set", token("RS256", "rsa")
    yield "RS256 by another key's id", token("RS256", "rsa", header={"kid": "first"})
    for odd in (7, None, ["ES256"], {"ES256": 1}, True):
        yield f"alg {odd!r}", signed({**GOOD, "alg": odd}, claims())


@pytest.mark.parametrize(
    ("name", "text"), list(confusions()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_algorithm_but_the_issuers(name: str, text: bytes, world: World) -> None:
    assert "not signed with ES256" in world.why_not(text)


def test_a_key_that_a_token_brings_along_is_not_used(world: World) -> None:
    evil = jwk("ES256", "evil")
    for extra in ({"jwk": evil}, {"jku": "http://127.0.0.1:1/"}, {"x5u": "http://127.0.0.1:1/"}, {"x5c": ["AAAA"]}):
        assert "signature" in world.why_not(token("ES256", "evil", header={"kid": "first", **extra}))
        assert world.principal(token(header={"kid": "first", **extra})) is not None, "it does no harm either"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "form"),
        (b"a..c", "form"),
        (token() + b"=", "form"),
        (token().replace(b".", b" ."), "form"),
        (b"\xff.\xff.\xff", "form"),
        (b"A.AA.AA", "header is not JSON"),
        (signed(b"{", claims()), "header is not JSON"),
        (signed(b"[]", claims()), "header is not an object"),
        (signed(b'{"alg": "ES256", "alg": "ES256"}', claims()), "header is not JSON"),
        (signed('{"alg": "ES256"}'.encode("utf-16"), claims()), "header is not JSON"),
        (signed(GOOD, b"null"), "payload is not an object"),
        (signed(GOOD, b"[" * 5000), "payload is not JSON"),
        (signed(GOOD, b"\xef\xbb\xbf{}"), "payload is not JSON"),
        (signed(GOOD, b'{"exp": ' + b"9" * 5000 + b"}"), "payload is not JSON"),
        (signed(GOOD, json.dumps(claims()).encode().replace(b'"exp"', b'"sub": "eve", "exp"')), "payload is not JSON"),
        (signed(GOOD, json.dumps(claims(exp=float("nan"))).encode()), "payload is not JSON"),
        (signed(GOOD, json.dumps(claims()).encode().replace(b"1800000600", b"1e999")), "exp"),
        (signed(GOOD, json.dumps(claims()).encode().replace(b"1800000600", b"1" + b"0" * 400)), "exp"),
        (signed({**GOOD, "crit": ["exp"]}, claims()), "critical"),
        (signed({**GOOD, "b64": False}, claims()), "signature"),
        (signed({**GOOD, "kid": 7}, claims()), "key id"),
        (signed({**GOOD, "kid": ""}, claims()), "not belong to its issuer"),
        (signed({**GOOD, "kid": "rsa"}, claims()), "not belong to its issuer"),
        (token(iss=None), "issuer"),
        (token(iss="https://evil.example/"), "issuer"),
        (token(iss=ISSUER.rstrip("/")), "issuer"),
        (signed(GOOD, claims(iss=[ISSUER])), "issuer"),
        (token(aud=None), "audience"),
        (token(aud="headway2"), "audience"),
        (token(aud=[["headway"]]), "audience"),
        (token(sub=None), "sub"),
        (signed(GOOD, claims(sub=7)), "sub"),
        (token(exp=None), "exp"),
        (signed(GOOD, claims(exp="1800000600")), "exp"),
        (signed(GOOD, claims(exp=[1])), "exp"),
        (signed(GOOD, claims(nbf="soon")), "nbf"),
        (signed(GOOD, claims(iat=[])), "iat"),
        (token(tenant=None), "tenant"),
        (token(tenant="a\x00b"), "tenant"),
        (token(tenant="x" * 129), "tenant"),
        (token(tenant=["acme"]), "tenant"),
        (signed(GOOD, json.dumps(claims(tenant="\ud800")).encode()), "tenant"),
        (token(sub="a\x1b[31mb"), "sub"),
        (token(tier=None), "tier"),
        (token(tier="gold"), "there is no such tier"),
        (token(tier=["paid"]), "tier"),
    ],
)
def test_what_is_refused_and_why(text: bytes, reason: str, world: World) -> None:
    assert reason in world.why_not(text)


def test_what_is_too_long_is_not_looked_into(world: World) -> None:
    long = token(filler="x" * MAX_TOKEN)
    with capture_logs() as logs:
        assert world.principal(long) is None
    assert logs == []


@pytest.mark.parametrize("leeway", [0, 30])
def test_a_token_lives_to_the_second(leeway: float) -> None:
    world = World(issuer(leeway_s=leeway), keys=jwks(jwk("ES256")))
    text, fresh = token(exp=NOW + 60), token(exp=NOW + 60, jti="not seen before")
    assert world.principal(text) is not None
    world.now = NOW + 60 + leeway - 0.001
    assert world.principal(text) is not None
    assert world.principal(fresh) is not None
    world.now = NOW + 60 + leeway
    for one in (text, fresh, token(exp=NOW + 60, jti="again")):
        with pytest.raises(Unauthenticated, match="expired"):
            world.principal(one)
    assert len(world.tokens) == 0


def test_only_a_genuine_token_is_said_to_have_expired(world: World) -> None:
    assert "signature" in world.why_not(token("ES256", "other", header={"kid": "first"}, exp=1))
    assert "audience" in world.why_not(token(exp=1, aud="other"))


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_a_token_of_the_future_is_not_valid_yet(claim: str, world: World) -> None:
    soon: dict[str, Any] = {claim: NOW + 30}
    later: dict[str, Any] = {claim: NOW + 30.5}
    assert world.principal(token(**soon)) is not None
    assert world.principal(token(**later)) is None
    world.now += 0.5
    assert world.principal(token(**later)) is not None


def test_claims_are_mapped_as_configured() -> None:
    mapped = issuer(
        user_claim="email",
        tenant_claim="https://example.com/org",
        tenant_prefix="login/",
        tier_claim="plan",
        default_tier="free",
        models_claim="models",
    )
    world = World(mapped, keys=jwks(jwk("ES256")))
    said: dict[str, Any] = {"email": "ada@example.com", "https://example.com/org": "acme", "models": ["a", "b"]}
    principal = world.accepted(token(plan="enterprise", **said))
    assert (principal.user, principal.tenant, principal.tier) == ("ada@example.com", "login/acme", 0)
    assert principal.models == {"a", "b"}
    principal = world.accepted(token(**said))
    assert principal.tier == 2, "the default"
    assert "tier" in world.why_not(token(plan="gold", **said))
    assert "plan" in world.why_not(token(plan=[], **said))
    assert "tenant" in world.why_not(token(**{**said, "https://example.com/org": "x" * 123}))
    for models in (None, [], "a", ["a", 1], ["a", ""]):
        assert "models" in world.why_not(token(**{**said, "models": models}))


def test_a_claim_of_model_limits_bounds_the_user_for_these_models() -> None:
    world = World(issuer(model_limits_claim="limits"), keys=jwks(jwk("ES256")))
    principal = world.accepted(token(limits={"big": {"rate": 60, "burst": 2}, "mid": {"rate": 6, "note": "x"}}))
    assert [(limit.name, limit.rate) for limit in principal.limits] == [("user", 1000.0)]
    assert principal.asking("other") is principal
    of_all, of_big = principal.asking("big").limits
    assert (of_all, of_big.rate, of_big.burst, of_big.model) == (principal.limits[0], 60.0, 2.0, "big")
    assert principal.asking("mid").limits[1].id != of_big.id
    empty = world.accepted(token(limits={}))
    assert not empty.of_models
    wrong: tuple[Any, ...] = (None, [], {"big": 60}, {"big": {"burst": 1}}, {"big": {"rate": 0}}, {"": {"rate": 1}})
    for limits in wrong:
        assert "model limits" in world.why_not(token(limits=limits))


def test_a_fixed_tenant_is_not_asked_for() -> None:
    world = World(issuer(tenant="acme"), keys=jwks(jwk("ES256")))
    principals = [world.principal(token(tenant=claimed)) for claimed in ("globex", None)]
    assert [principal and principal.tenant for principal in principals] == ["acme", "acme"]


def test_an_issuer_speaks_only_for_itself() -> None:
    other = Issuer(issuer="https://b.example/", audience="headway", jwks="x", algorithm="ES256", tenant="globex")
    first = KeySet(issuer(), Shelf(jwks(jwk("ES256", "first"))), lambda: 0.0)
    second = KeySet(other, Shelf(jwks(jwk("ES256", "second"))), lambda: 0.0)
    tokens = Tokens([first, second], SETTINGS, lambda: NOW)
    asyncio.run(tokens.open())
    assert tokens.identify(bearer(token("ES256", "first"))) is not None
    assert tokens.identify(bearer(token("ES256", "second", iss="https://b.example/"))) is not None
    assert tokens.identify(bearer(token("ES256", "first", iss="https://b.example/"))) is None
    assert tokens.identify(bearer(token("ES256", "second"))) is None


class Counted(jwt.PyJWS):
    checks = 0

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        Counted.checks += 1
        return super().decode(*args, **kwargs)


def test_a_known_token_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_VERIFIERS", {algorithm: Counted([algorithm]) for algorithm in ALGORITHMS})
    monkeypatch.setattr(Counted, "checks", 0)
    world = World(issuer(), keys=jwks(jwk("ES256")), most=3)
    texts = [token(jti=str(number)) for number in range(4)]
    for text in texts[:3]:
        assert world.principal(text) is world.principal(text)
    assert (Counted.checks, len(world.tokens)) == (3, 3)
    world.principal(texts[0])
    world.principal(texts[3])
    assert (Counted.checks, len(world.tokens)) == (4, 3)
    world.principal(texts[0])
    assert Counted.checks == 4, "it was asked for of late, so it is still known"
    world.principal(texts[1])
    assert Counted.checks == 5, "it was the one not seen for longest"


def test_a_token_is_forgotten_with_its_key(world: World) -> None:
    text = token()
    assert world.principal(text) is not None
    world.shelf.content = jwks(jwk("ES256"), jwk("ES256", "next"))
    world.refresh()
    assert world.principal(text) is not None
    assert world.principal(token("ES256", "next")) is not None
    world.shelf.content = jwks(jwk("ES256", "next"))
    world.refresh()
    assert "not belong to its issuer" in world.why_not(text)
    assert len(world.tokens) == 1


def test_an_unknown_key_is_asked_for_and_then_refused(world: World) -> None:
    world.monotonic += AGAIN
    with pytest.raises(RequestError) as caught:
        world.principal(token("ES256", "new"))
    assert (caught.value.code, caught.value.retry_after) == (SERVICE_OVERLOADED, 1.0)
    assert world.principal(token()) is not None, "the others go on"
    world.refresh()
    assert "not belong to its issuer" in world.why_not(token("ES256", "new"))
    world.monotonic += AGAIN
    world.shelf.content = jwks(jwk("ES256"), jwk("ES256", "new"))
    with pytest.raises(RequestError):
        world.principal(token("ES256", "new"))
    world.refresh()
    assert world.principal(token("ES256", "new")) is not None


def test_while_an_issuer_was_never_there_its_tokens_cannot_be_told() -> None:
    world = World(issuer(), keys="down")
    with pytest.raises(RequestError) as caught:
        world.principal(token())
    assert caught.value.code == SERVICE_OVERLOADED
    assert caught.value.retry_after == 1.0
    assert "issuer" in world.why_not(token(iss="other")), "nobody waits for the token of a stranger"
    world.shelf.content = jwks(jwk("ES256"))
    world.refresh()
    assert world.principal(token()) is not None


def test_no_token_is_ever_logged(world: World) -> None:
    world.monotonic += AGAIN
    with capture_logs() as logs:
        for text in (token(sub="canary\n"), token(tier="canary"), token("ES256", "canary"), token(iss="canary")):
            try:
                assert world.principal(text) is None
            except RequestError as exc:
                assert "canary" not in exc.message
    assert "canary" not in str(logs)


class Only:
    def __init__(self, name: str) -> None:
        self.principal = Principal(name, name, 0)

    def identify(self, authorization: bytes) -> Principal | None:
        return self.principal


@pytest.mark.parametrize(
    ("authorization", "asked"),
    [
        (b"Bearer hw_live_0123_4567", "keys"),
        (b"Bearer hw_live_a.b.c", "keys"),
        (b"Bearer any-old-key", "keys"),
        (b"Bearer a.b", "keys"),
        (b"", "keys"),
        (bearer(token()), "tokens"),
        (b"bearer  a.b.c ", "tokens"),
    ],
)
def test_each_credential_goes_to_who_knows_it(authorization: bytes, asked: str) -> None:
    principal = CombinedIdentity(Only("keys"), Only("tokens")).identify(authorization)
    assert principal is not None
    assert principal.user == asked
