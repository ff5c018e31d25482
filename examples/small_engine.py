"""A complete engine loop in one file: what `LLM.generate` does, without processes and clients.

    python examples/small_engine.py "Once upon a time" "One day, a little fox"

A Scheduler decides what a step computes, a Worker computes it, and the Scheduler takes the result.
Everything else in Quire stands around these three calls. To read further: `core/engine_core.py` is
this loop with clients, pauses and overlapped steps, `core/scheduling/step.py` fills a step, and
`executor/runner/plain_step.py` runs it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from quire import EngineArgs
from quire.core.output_rows import OutputRows
from quire.core.scheduling.scheduler import Scheduler
from quire.executor.worker import Worker
from quire.ipc.messages import EngineCoreOutputs, EngineCoreRequest
from quire.ipc.params import SamplingParams
from tokenizers import Tokenizer

CLIENT = 0  # rows are collected for each client; here is one


@dataclass
class Completion:
    """What is known of one request so far."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class SmallEngine:
    """One model, one scheduler, no process: `step` computes one step for all requests."""

    def __init__(self, **arguments):
        """`arguments`: those of LLM, such as model, max_num_seqs, num_threads."""
        config = EngineArgs(**arguments).create_engine_config()
        self.config = config

        # The worker has the model and the memory of the KV cache. Its blocks are numbered, and
        # which request has which block is not its business.
        self.worker = Worker(config)
        self.worker.load_model(report=lambda stage, fraction: None)
        num_blocks = self.worker.determine_num_blocks()
        self.worker.initialize_kv_cache(num_blocks)
        num_host_blocks, costs = self.worker.initialize_swap_space()

        # The scheduler has the requests and the numbers of the blocks, and knows no tensor.
        self.scheduler = Scheduler(
            config,
            num_blocks,
            num_host_blocks,
            costs,
            burst_weights_bytes=self.worker.burst_weights_bytes,
            kv_cache_windows=self.worker.kv_cache_windows,
            max_num_seqs=self.worker.max_num_seqs,
            num_state_checkpoints=self.worker.num_state_checkpoints,
        )
        self.rows = OutputRows()
        self.tokenizer = Tokenizer.from_file(f"{config.model_config.model}/tokenizer.json")
        self.completions: dict[str, Completion] = {}

    def add(self, prompt: str, max_tokens: int = 32, temperature: float = 0.0) -> None:
        """Queues a request. `InputProcessor` in the frontend checks and completes parameters; here
        they are all given.
        """
        request_id = str(len(self.completions))
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
        prompt_token_ids = self.tokenizer.encode(prompt).ids
        room = self.config.model_config.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids or max_tokens > room:
            raise ValueError(f"a prompt needs 1 token or more, and max_tokens at most {room}")
        eos_token_id = self.config.model_config.hf_config["eos_token_id"]
        eos_token_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
        self.completions[request_id] = Completion(prompt)
        self.scheduler.add_request(
            EngineCoreRequest(request_id, prompt_token_ids, params, eos_token_ids), CLIENT
        )

    def step(self) -> None:
        """Schedules, executes and processes one step; see EngineCore._step."""
        step = self.scheduler.schedule()
        if step is not None:
            # step.output says only what has changed: new requests, new blocks, freed slots, and
            # for each slot how many tokens are computed. The result has each slot's new tokens.
            output = self.worker.execute_model(step.output)
            self.scheduler.update_from_output(step, output, self.rows)
        by_client = self.rows.take(stats=None) or {}
        if CLIENT in by_client:
            self._deliver(by_client[CLIENT])

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """The columns of a step's outputs: row i has num_tokens[i] of token_ids."""
        start = 0
        for request_id, num_tokens in zip(outputs.request_ids, outputs.num_tokens):
            tokens = outputs.token_ids[start : start + num_tokens]
            self.completions[request_id].token_ids += tokens
            start += num_tokens
        for finished in outputs.finished:
            completion = self.completions[outputs.request_ids[finished.row]]
            completion.finish_reason = finished.error or str(finished.reason)

    def run(self) -> list[str]:
        """Steps until every request has ended; the texts in the order of `add`."""
        while any(one.finish_reason is None for one in self.completions.values()):
            self.step()
        return [self.tokenizer.decode(one.token_ids) for one in self.completions.values()]

    def close(self) -> None:
        """Releases model and cache."""
        self.worker.shutdown()


def main() -> None:
    prompts = sys.argv[1:] or ["Once upon a time", "One day, a little fox"]
    engine = SmallEngine()
    try:
        for prompt in prompts:
            engine.add(prompt)
        for prompt, text in zip(prompts, engine.run()):
            print(f"{prompt}{text}")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
