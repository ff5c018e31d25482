"""Another process of the same user that pushes outputs to a client, as an engine does."""

import subprocess
import sys

import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.codec import MessageEncoder
from quire.ipc.messages import EngineCoreOutputs, Finished, FinishReason
from quire.tests.core.test_engine_proc import collect, expected, make_request
from quire.tests.fake_engine import COMMAND, open_blocking
from quire.tests.fakes import make_config

FORGER = """
import sys, time, zmq
push = zmq.Context().socket(zmq.PUSH)
push.linger = 0
if sys.argv[3:]:
    push.curve_serverkey, _ = zmq.curve_keypair()
    push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
push.connect(sys.argv[1])
push.send(bytes.fromhex(sys.argv[2]))
time.sleep(0.3)
"""


@pytest.mark.parametrize("key", [[], ["a wrong key"]], ids=["without a key", "with a wrong key"])
def test_forged_outputs_do_not_arrive(key):
    """The forger knows the name of the socket, which every user may read."""
    config = make_config(hf_overrides={"delay_s": 0.01})
    client = open_blocking(MPClient.start(config, command=COMMAND))
    try:
        request = make_request("r", max_tokens=30)
        client.add_request(request)
        forged = EngineCoreOutputs(0, ["r"], [0], [0], [], [Finished(0, FinishReason.ABORT)])
        [frame] = MessageEncoder(2**20).encode(forged)
        address = client.client._connection.wire.output_address
        subprocess.run([sys.executable, "-c", FORGER, address, frame.hex(), *key], check=True)
        tokens, end = collect(client, "r")["r"]
        assert tokens == expected(request, config) and end.reason == FinishReason.LENGTH
        assert client.num_bad_frames == 0 and client.num_rejected_peers > 0
    finally:
        client.shutdown()
