"""The OTEL_… variables: what they mean, and that no value stops a process from starting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headway.app.tracing import make_tracing
from headway.config import Settings
from headway.model import Role
from headway.runtime.counters import Counters
from headway.telemetry.trace_environment import GRPC, HTTP, TraceEnvironment, read_environment

NAMES = (
    "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_TRACES_EXPORTER", "OTEL_PROPAGATORS", "OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "OTEL_SPAN_LINK_COUNT_LIMIT", "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_COMPRESSION",
    "OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_INSECURE",
)  # fmt: skip


def read(**variables: str) -> TraceEnvironment:
    return read_environment({f"OTEL_{name}": value for name, value in variables.items()})


def test_without_any_all_is_sampled_and_sent_to_this_machine() -> None:
    found = read()
    assert (found.off, found.ratio, found.follows, found.wrong) == ("", 1.0, True, ())
    assert (found.delay, found.most_waiting, found.most_sent) == (5.0, 2048, 512)
    assert (found.collector.protocol, found.collector.url) == (HTTP, "http://localhost:4318/v1/traces")
    assert (found.collector.timeout, found.collector.gzip, found.most_links) == (10.0, False, 1 << 16)


@pytest.mark.parametrize(
    ("name", "argument", "ratio", "follows"),
    [
        ("always_on", "", 1.0, False), ("always_off", "", 0.0, False), ("traceidratio", "0.25", 0.25, False),
        ("parentbased_always_on", "0.5", 1.0, True), ("parentbased_always_off", "", 0.0, True),
        ("parentbased_traceidratio", "0.01", 0.01, True), ("ParentBased_TraceIdRatio", "", 1.0, True),
    ],
)  # fmt: skip
def test_samplers(name: str, argument: str, ratio: float, follows: bool) -> None:
    found = read(TRACES_SAMPLER=name, TRACES_SAMPLER_ARG=argument)
    assert (found.ratio, found.follows, found.wrong) == (ratio, follows, ())


def test_the_variable_for_traces_goes_before_that_for_all_signals() -> None:
    every = {"EXPORTER_OTLP_ENDPOINT": "http://all:1/", "EXPORTER_OTLP_TIMEOUT": "1000"}
    found = read(**every)
    assert (found.collector.url, found.collector.timeout) == ("http://all:1/v1/traces", 1.0)
    found = read(**every, EXPORTER_OTLP_TRACES_ENDPOINT="https://own:2/x", EXPORTER_OTLP_TRACES_TIMEOUT="2500")
    assert (found.collector.url, found.collector.timeout) == ("https://own:2/x", 2.5)


@pytest.mark.parametrize(
    ("endpoint", "insecure", "url"),
    [("http://c:4317", "", "http://c:4317"), ("c:4317", "true", "http://c:4317"), ("c:4317", "", "https://c:4317")],
)
def test_the_endpoint_over_grpc_may_be_without_a_scheme(endpoint: str, insecure: str, url: str) -> None:
    found = read(
        EXPORTER_OTLP_PROTOCOL="grpc", EXPORTER_OTLP_ENDPOINT=endpoint, EXPORTER_OTLP_INSECURE=insecure
    ).collector
    assert (found.protocol, found.url) == (GRPC, url)


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("TRACES_SAMPLER", "jaeger_remote", "parentbased_always_on"), ("BSP_SCHEDULE_DELAY", "soon", "5000"),
        ("BSP_MAX_QUEUE_SIZE", "-1", "2048"), ("BSP_MAX_EXPORT_BATCH_SIZE", "1e3", "512"),
        ("EXPORTER_OTLP_ENDPOINT", "collector:4318", "http://localhost:4318"), ("EXPORTER_OTLP_TIMEOUT", "nan", "10000"),
        ("EXPORTER_OTLP_PROTOCOL", "http/json", HTTP), ("EXPORTER_OTLP_COMPRESSION", "brotli", "none"), ("SDK_DISABLED", "yes", "false"), ("TRACES_EXPORTER", "zipkin", "otlp"),
        ("PROPAGATORS", "b3", "tracecontext"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_told_of_and_passed_over(name: str, value: str, used: str) -> None:
    [wrong] = read(**{name: value}).wrong
    assert (wrong.name, wrong.used) == (f"OTEL_{name}", used)


def test_an_argument_counts_only_where_the_sampler_has_one() -> None:
    assert read(TRACES_SAMPLER_ARG="many").wrong == ()
    [wrong] = read(TRACES_SAMPLER="traceidratio", TRACES_SAMPLER_ARG="1.5").wrong
    assert (wrong.value, wrong.used) == ("1.5", "1.0")


def test_a_message_holds_no_more_than_may_wait() -> None:
    found = read(BSP_MAX_QUEUE_SIZE="100", BSP_MAX_EXPORT_BATCH_SIZE="200")
    assert (found.most_sent, len(found.wrong)) == (100, 1)
    assert read(BSP_MAX_QUEUE_SIZE="100").wrong == ()


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=20) | st.text("0123456789.=,:/@%-ehttp", max_size=30)))
def test_no_value_raises(variables: dict[str, str]) -> None:
    found = read_environment(variables)
    assert found.collector.shown and found.delay > 0


def tracing_logged(**variables: str) -> list[dict[str, object]]:
    with capture_logs() as lines:
        made = make_tracing(
            Settings(trace=True, name="here"), Role.SERVE, Counters().spans_dropped, lambda: 0.0,
            {f"OTEL_{name}": value for name, value in variables.items()},
        )  # fmt: skip
        assert (made is None) == any(line["event"] == "no traces are recorded" for line in lines)
    return [*map(dict, lines)]


def test_the_log_says_what_is_done() -> None:
    [line] = tracing_logged(EXPORTER_OTLP_ENDPOINT="http://user:secret@c:1", TRACES_SAMPLER_ARG="many")
    assert (line["event"], line["collector"]) == ("traces are recorded", "http://c:1/v1/traces")
    wrong, _ = tracing_logged(BSP_SCHEDULE_DELAY="soon")
    assert (wrong["log_level"], wrong["variable"], wrong["value"]) == ("warning", "OTEL_BSP_SCHEDULE_DELAY", "soon")


@pytest.mark.parametrize(("name", "value"), [("SDK_DISABLED", "true"), ("TRACES_EXPORTER", "none")])
def test_it_is_off_unless_it_is_asked_for_and_two_variables_turn_it_off(name: str, value: str) -> None:
    [line] = tracing_logged(**{name: value})
    assert line["variable"] == f"OTEL_{name}"
    assert make_tracing(Settings(), Role.SERVE, Counters().spans_dropped, lambda: 0.0, {}) is None
