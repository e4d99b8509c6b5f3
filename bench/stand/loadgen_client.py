"""MLPerf LoadGen as a client: the Server scenario in its own process, one request a query over kept connections.

    python bench/stand/loadgen_client.py --requests FILE --folder DIR --rate 600 --seconds 5 --bound-ms 250 URL …

LoadGen says when a query is due, measures latency from that time, and judges the run. `bench/load/loadgen.py` starts this, with FILE from
`bench.stand.judge`. It prints the result as JSON, with the client's own lateness: from due to issued by LoadGen's trace, until the request was
written, and until a received answer was read.
"""

import argparse
import collections
import re
import resource
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlperf_loadgen as loadgen
import msgspec

from bench.stand.judge import Late, Question, Verdict

ROUTE = "/v1/inference"
OK = b" 200 "
SWITCH_SECONDS = 0.0002
"""How long a thread may block the other: LoadGen's must not wait for the one that reads answers."""
BLOCKED_SECONDS = 0.00003
"""A poll that took longer has waited, so nothing was readable before it returned."""
SPARE = 8
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_DELAY = re.compile(r'"issue_delay":(\d+)')
_ISSUED = re.compile(r'"name":"IssueQuery".*"dur":([\d.]+)')
_LOGGED = re.compile(r"^:::MLLOG (.*)$", re.MULTILINE)


class Connection:
    """A connection that carries one query at a time.

    Attributes:
        query: its id in LoadGen; 0 for none.
        index: of its sample.
        again: it was sent again, because the server had closed the connection.
        length: of the whole answer, once its head has arrived.
    """

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self.query = self.index = self.length = 0
        self.again = False
        self.received = bytearray()
        self.socket = self._connected()

    def reopen(self) -> None:
        self.socket.close()
        self.received.clear()
        self.socket = self._connected()

    def _connected(self) -> socket.socket:
        connected = socket.create_connection(self._place, timeout=30.0)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected


class Client:
    """The system under test, as LoadGen calls it: sends each query as a request, and reads the answers.

    Connections are assigned to the URLs in turn.

    Attributes:
        reads: seconds that each answer may have waited to be read.
        failures: numbers of queries without a right answer, by status or reason.
        resent: queries that were sent again on a new connection.
    """

    def __init__(self, urls: list[str], questions: list[Question], connections: int) -> None:
        places = [(url.hostname or "", url.port or 80) for url in map(urlsplit, urls)]
        self._questions = questions
        self._requests = [_written(question.body) for question in questions]
        self._all = [Connection(places[number % len(places)]) for number in range(connections)]
        self._idle = collections.deque(self._all)
        self._poll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        for connection in self._all:
            self._watch(connection)
        self._opening = threading.Lock()
        self._ended = False
        self.reads: list[float] = []
        self.failures: collections.Counter[str] = collections.Counter()
        self.resent = 0

    def issue(self, samples: list[Any]) -> None:
        """Send a query. LoadGen's thread calls this when the query is due."""
        for sample in samples:
            if not self._idle:
                self._fail(sample.id, "no connection was idle")
                continue
            with self._opening:
                connection = self._idle.popleft()
                connection.query, connection.index, connection.again = sample.id, sample.index, False
                try:
                    connection.socket.sendall(self._requests[sample.index])
                except OSError:
                    self._send_again(connection)

    def read(self) -> None:
        """Read answers until `end`."""
        turn = time.perf_counter()
        while not self._ended:
            asked = time.perf_counter()
            ready = self._poll.poll(0.05, len(self._all))
            now = time.perf_counter()
            since = now if now - asked > BLOCKED_SECONDS else turn
            turn = now
            for descriptor, _ in ready:
                connection = self._by_descriptor.get(descriptor)
                if connection is not None and self._take(connection):
                    self.reads.append(time.perf_counter() - since)

    def end(self) -> None:
        self._ended = True

    def _take(self, connection: Connection) -> bool:
        """Read the available data. Returns True if that completed an answer."""
        try:
            octets = connection.socket.recv(1 << 18)
        except OSError:
            octets = b""
        if not octets:
            self._closed(connection)
            return False
        received = connection.received
        received += octets
        if not connection.length:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return False
            length = _LENGTH.search(received, 0, head)
            connection.length = head + 4 + (int(length[1]) if length else 0)
        if len(received) < connection.length:
            return False
        self._answered(connection)
        return True

    def _answered(self, connection: Connection) -> None:
        received, query = connection.received, connection.query
        status = bytes(received[8:13])
        if status != OK:
            self.failures[status.decode(errors="replace").strip()] += 1
        elif received.find(self._questions[connection.index].expected) < 0:
            self.failures["a wrong answer"] += 1
        received.clear()
        connection.query = connection.length = 0
        self._idle.append(connection)
        _complete(query)

    def _closed(self, connection: Connection) -> None:
        """Reopen a connection that the server has closed, and resend its query unless the answer had begun."""
        with self._opening:
            if not connection.query:
                self._reopen(connection)
            elif not connection.received and not connection.again:
                self._send_again(connection)
            else:
                query, connection.query, connection.length = connection.query, 0, 0
                self._reopen(connection)
                self._idle.append(connection)
                self._fail(query, "the connection was closed")

    def _send_again(self, connection: Connection) -> None:
        self.resent += 1
        connection.again = True
        self._reopen(connection)
        connection.socket.sendall(self._requests[connection.index])

    def _reopen(self, connection: Connection) -> None:
        self._by_descriptor.pop(connection.socket.fileno(), None)
        connection.reopen()
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        self._by_descriptor[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)

    def _fail(self, query: int, why: str) -> None:
        self.failures[why] += 1
        _complete(query)


def _complete(query: int) -> None:
    loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(query, 0, 0)])


def _written(body: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (ROUTE.encode(), len(body)) + body


def settings(options: argparse.Namespace, connections: int) -> Any:
    """Return LoadGen's settings: one sample a query, never several together."""
    made = loadgen.TestSettings()
    made.scenario = loadgen.TestScenario.Server
    made.mode = loadgen.TestMode.PerformanceOnly
    made.server_target_qps = options.rate
    made.server_target_latency_ns = int(options.bound_ms * 1e6)
    made.server_target_latency_percentile = options.percentile
    made.server_coalesce_queries = False
    made.server_max_async_queries = connections - SPARE
    made.min_duration_ms = int(options.seconds * 1000)
    made.min_query_count = options.queries
    made.qsl_rng_seed = made.sample_index_rng_seed = made.schedule_rng_seed = options.seed
    return made


def judged(client: Client, options: argparse.Namespace, connections: int, samples: int) -> Verdict:
    output, logs = loadgen.LogOutputSettings(), loadgen.LogSettings()
    output.outdir = str(options.folder)
    logs.log_output, logs.enable_trace = output, True
    tested = loadgen.ConstructSUT(client.issue, lambda: None)
    library = loadgen.ConstructQSL(samples, samples, lambda _: None, lambda _: None)
    reader = threading.Thread(target=client.read, name="reader")
    reader.start()
    loadgen.StartTestWithLogSettings(tested, library, settings(options, connections), logs)
    client.end()
    reader.join()
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(tested)
    return _verdict(options, client)


def _verdict(options: argparse.Namespace, client: Client) -> Verdict:
    detail = (options.folder / "mlperf_log_detail.txt").read_text(encoding="utf-8")
    lines = [msgspec.json.decode(line) for line in _LOGGED.findall(detail)]
    logged: dict[str, Any] = {line["key"]: line["value"] for line in lines}
    errors = [str(line["value"]) for line in lines if line["metadata"]["is_error"]]
    trace = (options.folder / "mlperf_log_trace.json").read_text(encoding="utf-8")
    return Verdict(
        result=logged["result_validity"],
        reason=" ".join([logged.get("result_invalid_reason", "").strip(), *errors]).strip(),
        early_stopping_met=bool(logged.get("early_stopping_met")),
        target_rate=options.rate,
        scheduled_rate=logged["result_scheduled_samples_per_sec"],
        queries=logged["result_query_count"],
        p50_ms=logged["result_50.00_percentile_latency_ns"] / 1e6,
        p95_ms=logged["result_95.00_percentile_latency_ns"] / 1e6,
        p99_ms=logged["result_99.00_percentile_latency_ns"] / 1e6,
        longest_ms=logged["result_max_latency_ns"] / 1e6,
        failures=dict(client.failures),
        resent=client.resent,
        late=Late(
            issue_ms=_p99([int(found) / 1e6 for found in _DELAY.findall(trace)]),
            write_ms=_p99([float(found) / 1e3 for found in _ISSUED.findall(trace)]),
            read_ms=_p99([seconds * 1e3 for seconds in client.reads]),
        ),
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="MLPerf LoadGen's Server scenario over HTTP.")
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL")
    add("--requests", type=Path, required=True, help="as bench.stand.judge writes them")
    add("--folder", type=Path, required=True, help="where LoadGen's logs go")
    add("--rate", type=float, required=True, help="target queries per second")
    add("--seconds", type=float, required=True, help="least duration")
    add("--queries", type=int, default=1, help="least number of them (default %(default)d)")
    add("--bound-ms", type=float, required=True, help="on the latency at the percentile")
    add("--percentile", type=float, default=0.99)
    add("--seed", type=int, default=1)
    options = parser.parse_args()
    connections = max(64, int(options.rate * options.bound_ms / 1000.0 * 2)) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (connections + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.setswitchinterval(SWITCH_SECONDS)
    questions = msgspec.msgpack.decode(options.requests.read_bytes(), type=list[Question])
    client = Client(options.urls, questions, connections)
    sys.stdout.buffer.write(msgspec.json.encode(judged(client, options, connections, len(questions))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
