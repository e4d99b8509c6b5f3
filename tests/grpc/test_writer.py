"""A connection's writer on its own, without a loop: what it sends, when it asks for `take`, and its client's burden."""

from headway.grpc.writer import CANCELLED, DEFAULT_WINDOW, LEAST_PING, Burden, Http2Writer

FLUSH = 1 << 17


class Waiting:
    def __init__(self, writer: Http2Writer, number: int, size: int) -> None:
        self.writer, self.number, self.left = writer, number, bytes(size)
        writer.windows[number] = 0
        writer.stuck[number] = self.pump

    def pump(self) -> bool:
        while self.left and (size := self.writer.send(self.number, self.left)):
            self.left = self.left[size:]
        return not self.left


def writer() -> tuple[Http2Writer, list[None]]:
    """Return a writer, and a list that grows each time it asks for `take`."""
    woken = list[None]()
    return Http2Writer(Burden(), lambda: woken.append(None)), woken


def test_the_writer_asks_once_to_be_taken_from() -> None:
    out, woken = writer()
    for number in (1, 3):
        out.windows[number] = 0
        out.answer(number, b"\x88", b"abc", b"")
    assert (len(woken), out.windows) == (1, {})
    assert len(out.take()) == 2 * (3 * 9 + 4)
    assert (out.take(), len(woken)) == (b"", 1)
    out.grant(5, 1)
    assert len(woken) == 2


def test_messages_that_wait_for_room_are_sent_bit_by_bit() -> None:
    out, _ = writer()
    stream = Waiting(out, 1, 3 * FLUSH)
    out.widen(0, 10 * FLUSH)
    assert DEFAULT_WINDOW < len(out.take()) < DEFAULT_WINDOW + 100
    assert (out.take(), len(out.stuck)) == (b"", 1)
    out.widen(1, 10 * FLUSH)
    taken = []
    while out.stuck:
        taken.append(len(out.take()))
    assert max(taken) < FLUSH + 100
    assert (len(taken), stream.left) == (3, b"")


def test_nothing_is_sent_while_the_transport_takes_nothing() -> None:
    out, _ = writer()
    Waiting(out, 1, 3)
    out.blocked = 1.0
    assert (out.room(1), out.take()) == (0, b"")
    out.resume()
    assert out.take()[-3:] == bytes(3)


def test_messages_that_wait_are_tried_when_room_has_come_and_not_whenever_a_client_sends_a_byte() -> None:
    out, _ = writer()
    tries = list[int]()

    def send() -> bool:
        tries.append(1)
        return False

    for number in range(1, 200, 2):
        out.windows[number] = 0
        out.stuck[number] = send
    for _ in range(16):
        out.flush_soon()
        out.take()
    assert not tries
    out.heed(bytes.fromhex("000400000001"))
    out.take()
    assert len(tries) == 100


def test_small_pieces_cost_their_client_and_then_wait_for_the_sweep() -> None:
    out, _ = writer()
    stream = Waiting(out, 1, 5000)
    out.windows[1] = 1 - DEFAULT_WINDOW
    out.pump()
    assert (len(stream.left), out.burden.frames) == (4999, 10)
    out.burden.frames = 2000
    out.widen(1, 1)
    out.pump()
    assert len(stream.left) == 4999
    out.pump(sweep=True)
    assert len(stream.left) == 4998
    out.widen(1, 5000)
    out.pump()
    assert (stream.left, out.burden.frames) == (b"", 2010 - CANCELLED)


def test_an_answer_explains_frames_and_pings() -> None:
    client = Burden()
    client.frames = 5
    assert [client.ping(now) for now in (0.0, 1.0, 2.0, 3.0)] == [True, True, True, False]
    client.explain(CANCELLED)
    assert [client.ping(now) for now in (4.0, 5.0, 6.0, 7.0)] == [True, True, True, False]
    assert client.ping(7.0 + LEAST_PING)
    client.explain(CANCELLED)
    client.relieve()
    assert client.frames == 0
