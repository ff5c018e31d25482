"""An engine in this process whose messages are encoded and decoded, so that tests cannot pass
objects that the wire could not carry.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from quire.frontend.clients.client import result_of
from quire.frontend.clients.inproc_client import InprocClient
from quire.ipc import messages as m
from quire.ipc.codec import BadFrameError, MessageDecoder, MessageEncoder, readable_error
from quire.ipc.config import EngineConfig

MAX_BYTES = 2**26


class RoundTripClient(InprocClient):
    def __init__(self, config: EngineConfig, **options: Any):
        super().__init__(config, **options)
        self._encoder = MessageEncoder(MAX_BYTES)
        self._to_engine = MessageDecoder(m.ClientMessage, MAX_BYTES)
        self._to_client = MessageDecoder(m.EngineMessage, MAX_BYTES)

    def add_request(self, request: m.EngineCoreRequest) -> None:
        """One that cannot be decoded gets an error row, as from ipc/engine_input.py."""
        frames = self._encoder.encode(request)
        try:
            super().add_request(self._to_engine.decode(frames))
        except BadFrameError as error:
            finished = [m.Finished(0, m.FinishReason.ERROR, error=readable_error(error, frames))]
            refusal = m.EngineCoreOutputs(
                self.ready.epoch,
                [request.request_id],
                [0],
                [0],
                [],
                finished,
                engine_index=self.ready.engine_index,
            )
            self._engine.submit(lambda: self._engine.deliver({0: refusal}))

    def get_output(self) -> m.EngineCoreOutputs:
        return self._to_client.decode(self._encoder.encode(super().get_output()))

    async def get_output_async(self) -> m.EngineCoreOutputs:
        return self._to_client.decode(self._encoder.encode(await super().get_output_async()))

    def _begin_call(self, method: str, args: tuple) -> Future:
        call = m.UtilityCall(0, method, list(args))
        sent = self._to_engine.decode(self._encoder.encode(call))
        return self._engine.begin_call(sent, self._received)

    def _received(self, message: m.UtilityResult) -> Any:
        return result_of(self._to_client.decode(self._encoder.encode(message)))
