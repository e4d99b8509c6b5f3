from headway.model import InferenceRequest, Principal, RequestOptions, Value
from headway.runtime.request_id import new_id
from tests.services.fake_backend import ANYBODY


def request(
    input: Value = "a",
    caller: Principal = ANYBODY,
    options: RequestOptions | None = None,
    *,
    id: str = "",
    model: str = "m",
    parameters: bytes = b"",
    timeout: float = 4.0,
    tier: int = 1,
    **others: object,
) -> InferenceRequest:
    """Return a request with `options`, or with options made from the other arguments."""
    options = options or RequestOptions(timeout, tier, **others)  # type: ignore[arg-type]
    return InferenceRequest(caller, id or new_id(), options, model, input, parameters)
