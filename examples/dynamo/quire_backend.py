"""Quire as a backend of Dynamo: token ids come in, token ids go out. Dynamo's frontend has the HTTP
API, chat templates, tokenizer and stop strings.

    python quire_backend.py --model PATH --discovery-backend file &
    python -m dynamo.frontend --discovery-backend file --router-mode kv

Written for `dynamo.common.backend` of ai-dynamo 1.6.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown
from quire import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    InvalidParameterError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

DRAIN_TIMEOUT_S = 30.0
# what has the same name in a request's sampling_options or stop_conditions and in SamplingParams
SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
)
GUIDES = ("json", "regex", "choice", "grammar")
FINISH_REASONS = {"abort": "cancelled"}  # others have the same name


class QuireEngine(LLMEngine):
    """One engine process. If it dies, Quire replaces it and its requests continue."""

    def __init__(self, model: str, arguments: dict[str, Any], kv_events_port: int) -> None:
        if kv_events_port:
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{kv_events_port}"}
            arguments = {"kv_events_config": events} | arguments
        self._args = EngineArgs(model, **arguments)
        self._kv_events_port = kv_events_port
        self._engine: AsyncLLM | None = None
        self._publisher: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[QuireEngine, WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
        parser.add_argument("--model", required=True, help="a folder, which the frontend reads too")
        parser.add_argument("--served-model-name", help="default: the folder")
        parser.add_argument("--engine-args", type=json.loads, default={}, help="EngineArgs as JSON")
        parser.add_argument("--kv-events-port", type=int, default=5557, help="0: no KV events")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="etcd")
        parser.add_argument("--request-plane", default="tcp")
        options = parser.parse_args(argv)
        worker = WorkerConfig(
            namespace=options.namespace,
            component="quire",
            model_name=options.model,
            served_model_name=options.served_model_name or options.model,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
        )
        return cls(options.model, options.engine_args, options.kv_events_port), worker

    async def start(self, worker_id: int) -> EngineConfig:
        self._engine = await AsyncLLM.start(self._args)
        config, metrics = self._engine.config, await self._engine.get_metrics()
        return EngineConfig(
            model=config.model_config.model,
            llm=LlmRegistration(
                context_length=config.model_config.max_model_len,
                kv_cache_block_size=config.cache_config.block_size,
                total_kv_blocks=metrics["num_blocks"],
                max_num_seqs=config.scheduler_config.max_num_seqs,
                max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            ),
        )

    async def generate(
        self, request: dict[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        engine = self._started()
        prompt = token_ids_to_list(request["token_ids"])
        num_generated = 0
        try:
            params = self._params(request)
            stream = engine.generate({"prompt_token_ids": prompt}, params, context.id())
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        is_the_clients = output.error_parameter is not None
                        raise (InvalidArgument if is_the_clients else Unknown)(output.error)
                    num_generated += sum(len(choice.token_ids) for choice in output.outputs)
                    for chunk in _chunks(output, len(prompt), num_generated):
                        yield chunk
                    self._publish_load(engine)
        except InvalidParameterError as error:
            raise InvalidArgument(str(error)) from error
        except EngineDeadError as error:  # Dynamo continues the request on another worker
            raise EngineShutdown(str(error)) from error

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            await self._engine.abort(context.id())

    async def drain(self) -> None:
        """Waits for what runs. Dynamo routes no new requests to this worker any more."""
        if self._engine is not None:
            await self._engine.wait_until_idle(DRAIN_TIMEOUT_S)

    async def is_quiescent(self) -> bool:
        return self._engine is None or not self._engine.has_unfinished_requests()

    async def cleanup(self) -> None:
        await self.drain()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown_async()

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id=1)

    # ------------------------------------------------------------ for KV-aware routing

    async def kv_event_sources(self) -> list[ZmqSource]:
        port = self._kv_events_port
        return [ZmqSource(endpoint=f"tcp://127.0.0.1:{port}")] if port else []

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    def _publish_load(self, engine: AsyncLLM) -> None:
        """Tells the router how full the cache is, after each output."""
        stats = engine.stats
        if self._publisher is None or stats is None or stats.num_blocks <= 1:
            return
        total = stats.num_blocks - 1  # one block is never used
        used = total - stats.num_free_blocks
        hits, queries = stats.prefix_cache_hits, stats.prefix_cache_queries
        snapshot = ComponentSnapshot(
            kv_used_blocks=used,
            kv_total_blocks=total,
            gpu_cache_usage=used / total,
            dp_rank=0,
            kv_cache_hit_rate=hits / queries if queries else None,
        )
        self._publisher.publish(0, snapshot)

    # ------------------------------------------------------------ requests

    def _started(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineShutdown("the engine is not running")
        return self._engine

    def _params(self, request: dict[str, Any]) -> SamplingParams:
        """What a request does not give is as in the model's generation_config.json."""
        options, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
        wanted = options | stops
        given = {name: wanted[name] for name in SAME_NAMES if wanted.get(name) is not None}
        given.setdefault("max_tokens", None)  # to the end of the context
        hidden = stops.get("stop_token_ids_hidden") or []
        guide = options.get("guided_decoding") or {}
        guided = {name: guide[name] for name in GUIDES if guide.get(name) is not None}
        return msgspec.structs.replace(
            self._started().get_default_sampling_params(),
            **given | {"stop_token_ids": [*given.get("stop_token_ids", ()), *hidden] or None},
            structured_outputs=StructuredOutputsParams(**guided) if guided else None,
            logprobs=(request.get("output_options") or {}).get("logprobs"),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def _chunks(output: RequestOutput, num_prompt: int, num_generated: int) -> list[dict[str, Any]]:
    """One chunk for each choice with new tokens. The last one has the usage."""
    chunks = []
    for choice in output.outputs:
        chunk: dict[str, Any] = {"token_ids": choice.token_ids, "index": choice.index}
        if choice.finish_reason is not None:
            chunk["finish_reason"] = FINISH_REASONS.get(choice.finish_reason, choice.finish_reason)
        if choice.logprobs is not None:
            pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
            chunk["log_probs"] = [position[token].logprob for token, position in pairs]
            chunk["top_logprobs"] = [
                [
                    {"rank": one.rank, "token_id": token, "token": None, "logprob": one.logprob}
                    for token, one in position.items()
                ]
                for _, position in pairs
            ]
        chunks.append(chunk)
    if output.finished and chunks:
        chunks[-1]["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
    return chunks


if __name__ == "__main__":
    run(QuireEngine)
