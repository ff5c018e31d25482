"""Addresses, and sockets that only the holder of their key can use."""

import contextlib
import errno
import os
import secrets
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import zmq
from quire.ipc.errors import InvalidParameterError, QuireError
from quire.ipc.sockets import (
    MAX_PATH_BYTES,
    RejectedPeers,
    Wire,
    bind,
    bind_to_engines,
    connect_dealer,
    connect_push,
    ipc_path,
    make_context,
    make_wire,
    receive,
)
from quire.tests.fake_engine import wait_until
from quire.tests.wires import ClientEnds

LIMIT = 2**20
NOBODY = 65534


@pytest.fixture
def context():
    with make_context() as made:
        yield made


@pytest.fixture
def ends(context):
    made = ClientEnds(context, LIMIT)
    yield made
    made.close()


def test_addresses():
    assert ipc_path("ipc:///a/b") == Path("/a/b")
    assert ipc_path("ipc://b.sock") == Path.cwd() / "b.sock"


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "/a/b",
        "",
        "ipc://",
        "ipc://@name",
        "ipc://*",
        "ipc:///a/",
        "inproc://x",
    ],
)
def test_refused_addresses(address):
    with pytest.raises(InvalidParameterError) as caught:
        ipc_path(address, "listen")
    assert caught.value.parameter == "listen"


def test_the_longest_path_works_and_one_more_is_refused():
    with tempfile.TemporaryDirectory(prefix="q") as base:  # pytest's tmp_path may be too long
        path = Path(base) / ("x" * (MAX_PATH_BYTES - len(base) - 1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(ipc_path(f"ipc://{path}")))
        with pytest.raises(InvalidParameterError, match="at most 107 bytes"):
            ipc_path(f"ipc://{path}x")


def test_a_wire_has_a_new_name_and_key_each_time():
    (one, one_secret), (two, two_secret) = make_wire(), make_wire()
    assert one.is_valid() and one.name != two.name and one.key != two.key
    assert one_secret not in (one.key, two_secret)
    for wire in (Wire("/tmp/x", one.key), Wire(one.name + "\n", one.key), Wire(one.name, b"short")):
        assert not wire.is_valid()


def test_a_build_without_curve_is_refused(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(QuireError, match="no CURVE"):
        make_wire()


def test_the_holder_of_the_key_is_heard(context, ends):
    assert receive(ends.pull) is None
    with (
        connect_push(context, ends.wire) as push,
        connect_dealer(context, ends.wire, LIMIT) as dealer,
    ):
        push.send_multipart([b"one", b"two"])
        dealer.send(b"three")
        assert ends.pull.poll(60_000) and ends.router.poll(60_000)
        assert [bytes(frame) for frame in receive(ends.pull)] == [b"one", b"two"]
        assert bytes(receive(ends.router)[1]) == b"three"


def plain(context: zmq.Context) -> zmq.Socket:
    return context.socket(zmq.PUSH)


def with_another_key(context: zmq.Context) -> zmq.Socket:
    made = context.socket(zmq.PUSH)
    made.curve_serverkey, _ = zmq.curve_keypair()
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    return made


@pytest.mark.parametrize("stranger", [plain, with_another_key])
def test_a_stranger_is_not_heard_and_counted(context, ends, stranger):
    rejected = RejectedPeers(context, ends.pull)
    assert rejected.count() == 0
    with stranger(context) as push:
        push.linger = 0
        push.reconnect_ivl = -1
        push.connect(ends.wire.output_address)
        with contextlib.suppress(zmq.Again):  # it has been rejected already
            push.send(b"forged", zmq.NOBLOCK)
        wait_until(lambda: rejected.count() == 1)
    with connect_push(context, ends.wire) as push:
        push.send(b"true")
        assert ends.pull.poll(60_000) and bytes(receive(ends.pull)[0]) == b"true"
    assert receive(ends.pull) is None and rejected.count() == 1
    rejected.close()
    assert rejected.count() == 1


def test_many_strangers_do_not_stop_the_sockets(context, ends):
    """ZMQ's threads wait for a reader of a monitor's events that is at its limit."""
    rejected = RejectedPeers(context, ends.pull)
    for _ in range(2_500):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect("\0" + ends.wire.output_address.partition("@")[2])
    with connect_push(context, ends.wire) as push:
        push.send(b"true")
        assert ends.pull.poll(10_000)
    wait_until(lambda: rejected.count() == 2_500)
    rejected.close()


class Relay:
    """Stands between an engine and the output socket of `ends`: it passes bytes on in both
    directions, and holds back what the engine sends once `holds` is set.
    """

    def __init__(self, ends: ClientEnds):
        self.wire = Wire(secrets.token_hex(16), ends.wire.key)
        self.holds, self.held = False, b""
        self._target = "\0" + ends.wire.output_address.partition("@")[2]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.wire.output_address.partition("@")[2])
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self._listener.accept()
                self.client = socket.socket(socket.AF_UNIX)
                self.client.connect(self._target)
                for ways in ((engine, self.client), (self.client, engine)):
                    threading.Thread(target=self._copy, args=ways, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if self.holds and target is self.client:
                    self.held += data
                else:
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def take(self) -> bytes:
        """The next message that is held back, as it is on the wire."""
        wait_until(lambda: self.held)
        data, self.held = self.held, b""
        return data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize(
    ("sent", "heard"),
    [
        (lambda one, two: one + two, [b"one", b"two"]),
        (lambda one, two: one + one + two, [b"one"]),  # replayed
        (lambda one, two: two + one, [b"two"]),  # reordered
        (lambda one, two: one[:-1] + bytes([one[-1] ^ 1]) + two, []),  # changed
    ],
    ids=["as sent", "replayed", "reordered", "changed"],
)
def test_a_message_is_heard_once_and_in_order(context, ends, sent, heard):
    """The rest is dropped and counted. From then on ZMQ may read nothing of this connection: see
    tests/frontend/supervision/test_broken_wire.py.
    """
    relay, rejected = Relay(ends), RejectedPeers(context, ends.pull)
    with connect_push(context, relay.wire) as push:
        push.send(b"zero")
        assert ends.pull.poll(60_000) and bytes(receive(ends.pull)[0]) == b"zero"
        relay.holds = True
        push.send(b"one")
        one = relay.take()
        push.send(b"two")
        relay.client.sendall(sent(one, relay.take()))
        for text in heard:
            assert ends.pull.poll(60_000) and bytes(receive(ends.pull)[0]) == text
        if heard != [b"one", b"two"]:
            wait_until(lambda: rejected.count() == 1)
        assert not ends.pull.poll(50) and rejected.count() == (heard != [b"one", b"two"])
    rejected.close()
    relay.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_not_heard_even_with_the_key(ends):
    pid = os.fork()
    if pid == 0:
        os.setuid(NOBODY)
        context = make_context()
        push = connect_push(context, ends.wire)
        push.send(b"forged")
        push.close(linger=500)
        os._exit(0)
    assert not ends.pull.poll(300)
    os.waitpid(pid, 0)


def test_an_end_for_another_user(context):
    ends = ClientEnds(context, LIMIT, peer_uid=NOBODY)
    with connect_push(context, ends.wire) as push:
        push.linger = 0
        push.send(b"from root, or from whoever runs the tests")
        assert not ends.pull.poll(200)
    ends.close()


class WithoutFilter(zmq.Socket):
    """As ZMQ may be built for macOS."""

    def setsockopt(self, option, value):
        if option == zmq.IPC_FILTER_UID:
            raise zmq.ZMQError(errno.EINVAL)
        super().setsockopt(option, value)


class ContextWithoutFilter(zmq.Context):
    _socket_class = WithoutFilter


@pytest.mark.parametrize("listen", ["client", "engine"])
def test_where_zmq_cannot_tell_users_apart_the_file_does(tmp_path, listen):
    context = ContextWithoutFilter()
    address = f"ipc://{tmp_path}/kv"
    if listen == "engine":
        made = bind_to_engines(context, address, None)
    else:
        made = context.socket(zmq.PULL)
        bind(made, address, os.geteuid())
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o600
    made.close()
    with pytest.raises(zmq.ZMQError):  # nothing else protects it
        bind_to_engines(context, "ipc://@quire-test", None)
    context.term()
