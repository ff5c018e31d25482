"""A client's ends of a wire, without the rest of a Connection."""

import os

import zmq
from quire.ipc.sockets import bind, make_pull, make_router, make_wire


class ClientEnds:
    """Bound like those of a Connection."""

    def __init__(self, context: zmq.Context, max_message_bytes: int, peer_uid: int | None = None):
        self.wire, secret_key = make_wire()
        self.router = make_router(context, secret_key, max_message_bytes)
        self.pull = make_pull(context, secret_key, max_message_bytes)
        uid = os.geteuid() if peer_uid is None else peer_uid
        bind(self.router, self.wire.input_address, uid)
        bind(self.pull, self.wire.output_address, uid)

    def close(self) -> None:
        self.router.close(linger=0)
        self.pull.close(linger=0)
