"""The program of one rank: `python -m quire.executor.ranks.rank`, started by LocalRanks.

Must not know: the scheduler, clients, how many steps are under way.

It runs a Worker, with its part of every layer, and answers each command before it reads the next
one, but Fetch, CheckGrammar and ReadLora, which other threads do.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import zlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...ipc import platform_tuning
from ...ipc.codec import MessageDecoder, MessageEncoder
from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidParameterError
from ...ipc.failures import pack_exception
from ...ipc.log_format import FORMATS, configure_logging
from ...ipc.lora import LoRARequest
from ...ipc.machine import available_cores
from ...ipc.process import STACKS_SIGNAL, die_with_parent, read_key
from ...ipc.step_messages import ModelRunnerOutput
from .messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Call,
    CheckGrammar,
    Command,
    Configure,
    EndFetch,
    Fetch,
    Kept,
    Leave,
    Loading,
    MoveBlocks,
    OffloadOpened,
    RankEnds,
    ReadLora,
    Reply,
    Result,
    Step,
    StepDone,
    Trace,
)
from .ring import RingReader, RingWriter, join_frames, split_frames

if TYPE_CHECKING:
    from ..groups.tensor_group import TensorGroup
    from ..worker import Worker

logger = logging.getLogger("quire.rank")


class RankLinks(Protocol):
    """What connects a rank to its engine and to the other ranks."""

    @property
    def rank(self) -> int: ...

    def receive(self) -> bytes:
        """Waits for a command."""
        ...

    def send(self, reply: bytes) -> None:
        """Sends a reply. One thread calls it at a time."""
        ...

    def make_group(self, config: EngineConfig) -> TensorGroup:
        """The rank's group. Called once torch may be imported, and the device is chosen."""
        ...


class SharedLinks:
    """Implements RankLinks in memory that all ranks of this machine share."""

    def __init__(self, ends: RankEnds):
        self.rank = ends.rank
        self._ends = ends
        self._commands = RingReader(ends.commands, ends.rank)
        self._replies = RingWriter(ends.replies)

    def receive(self) -> bytes:
        """See RankLinks."""
        return self._commands.receive()

    def send(self, reply: bytes) -> None:
        """See RankLinks."""
        self._replies.send(reply)

    def make_group(self, config: EngineConfig) -> TensorGroup:
        """See RankLinks. Where tensors do not go through shared memory it waits for the others."""
        if self._ends.store is None:
            from .shared_links import shared_group

            return shared_group(self._ends, is_process=True)
        from ..device import select_device
        from .torch_links import local_group

        device = select_device(config.device_config.device)
        return local_group(self._ends, config.service_config.step_timeout_s, device)


# the methods of KVOffload that a MoveBlocks may name
OFFLOAD_METHODS = frozenset(
    {"store", "store_states", "load", "load_state", "touch", "remove", "clear"}
)


class Rank:
    """Serves one engine until a Leave arrives."""

    # the methods of Worker that a Call may name
    CALLS = frozenset(
        {"determine_num_blocks", "initialize_kv_cache", "execute_dummy_batch", "collective_rpc"}
        | {"plan_swap_space", "open_swap_space", "run_pass", "run_draft_pass", "use_pass_times"}
        | {"start_trace", "check_health", "remove_lora", "list_loras"}
        | {"join_engines", "meet_engines", "join_pass"}
    )

    def __init__(self, links: RankLinks, num_threads: int):
        self._links = links
        self._num_threads = num_threads
        self._decoder = MessageDecoder(Command, MAX_MESSAGE_BYTES)
        self._encoder = MessageEncoder(MAX_MESSAGE_BYTES)
        self._lock = threading.Lock()  # of replies: some come from other threads
        self._fetches: dict[int, Future[None]] = {}  # that have not ended, by their numbers
        self._worker: Worker

    def run(self) -> None:
        """Returns after a Leave."""
        while not isinstance(command := self._receive(), Leave):
            try:
                self._obey(command)
            except Exception as error:
                logger.debug("rank %d: %r failed", self._links.rank, command, exc_info=error)
                self._reply(pack_exception(error))

    def _obey(self, command: Any) -> None:
        if isinstance(command, Step):
            self._reply(run_step(self._worker, command))
        elif isinstance(command, Call):
            self._reply(self._call(command))
        elif isinstance(command, MoveBlocks):
            self._reply(move_blocks(self._worker, command))
        elif isinstance(command, Fetch):
            self._fetch(command)
        elif isinstance(command, EndFetch):
            if (fetch := self._fetches.get(command.number)) is not None:
                fetch.cancel()
        elif isinstance(command, CheckGrammar):
            number = command.number
            params, is_known, owner = command.params, command.is_known, command.owner
            check = self._worker.check_grammar(params, is_known=is_known, owner=owner)
            check.add_done_callback(lambda check: self._reply(_answer(number, check)))
        elif isinstance(command, ReadLora):
            of_lora = command.number
            read = self._worker.read_lora(command.request)
            read.add_done_callback(lambda read: self._reply(_answer(of_lora, read)))
        elif isinstance(command, Configure):
            self._configure(command.config)
            self._reply(Result())

    def _fetch(self, command: Fetch) -> None:
        number, offload = command.number, self._worker.offload
        fetch = None if offload is None else offload.fetch(command.beginning())
        if fetch is None:
            return self._reply(Answer(number))
        self._fetches[number] = fetch

        def end(_: Future[None]) -> None:
            del self._fetches[number]
            self._reply(Answer(number))

        fetch.add_done_callback(end)

    def _configure(self, config: EngineConfig) -> None:
        from .. import lean_import

        lean_import.import_torch(config)
        from ..device import use_gpu_of_rank
        from ..worker import Worker

        if config.device_config.device == "cuda":
            use_gpu_of_rank(config, self._links.rank)
        group = self._links.make_group(config)
        self._worker = Worker(with_threads(config, self._num_threads), group)

    def _call(self, call: Call) -> Reply:
        worker = self._worker
        if call.method == "load_model":
            worker.load_model(lambda *progress: self._reply(Loading(*progress)))
            return Result(list(worker.kv_cache_windows))
        if call.method == "end_trace":
            return Trace.of(worker.end_trace())
        if call.method == "initialize_kv_cache":
            num_bytes = worker.initialize_kv_cache(*call.args)
            platform_tuning.end_start()
            platform_tuning.unmap_unchanged()
            rooms = worker.max_num_seqs, worker.num_state_checkpoints
            return Result([num_bytes, worker.burst_weights_bytes, *rooms])
        if call.method == "initialize_offload":
            return open_offload(worker)
        if call.method == "add_lora":
            return Result(worker.add_lora(msgspec.convert(call.args[0], LoRARequest)))
        if call.method not in self.CALLS:
            raise ValueError(f"a rank has no method {call.method!r}")
        return Result(getattr(worker, call.method)(*call.args))

    def _receive(self) -> Any:
        return self._decoder.decode(split_frames(self._links.receive()))

    def _reply(self, reply: Reply) -> None:
        with self._lock:
            self._links.send(join_frames(self._encoder.encode(reply)))


def run_step(worker: Worker, step: Step) -> StepDone:
    """Runs a step on a rank."""
    group = worker.group
    if not group.stages.is_last:
        for one in step.sampled:
            worker.append_sampled(one.num_sampled, one.token_ids, one.num_drafts, one.draft_ids)
        worker.execute_model(step.output)
        return StepDone(kept=_changed(worker))
    output = worker.execute_model(step.output)
    drafts = worker.drafts_of(step.output.slots)
    sent = output if group.rank == 0 else None
    return StepDone(digest_of(output, drafts), sent, _changed(worker), *drafts)


def open_offload(worker: Worker) -> OffloadOpened:
    """Opens what a rank keeps outside the cache. A failure is an answer, since the other ranks may
    have none.
    """
    try:
        offload = worker.initialize_offload()
    except InvalidParameterError as error:
        return OffloadOpened(failure=pack_exception(error))
    if offload is None:
        return OffloadOpened()
    sizes = offload.num_blocks, offload.block_bytes, offload.blocks_per_state
    return OffloadOpened(*sizes, offload.has_blocks, Kept(*offload.take_names()))


def move_blocks(worker: Worker, command: MoveBlocks) -> Kept:
    """Moves blocks or states of a rank. After a failure of its file it keeps none, and says so."""
    offload, method = worker.offload, command.method
    if method not in OFFLOAD_METHODS:
        raise ValueError(f"a rank moves no blocks by {method!r}")
    if offload is None:  # this rank's layers keep nothing
        return Kept()
    is_loaded = getattr(offload, method)(*command.args) is not False
    names, transfers = offload.take_names(), offload.take_transfers()
    return Kept(*names, offload.num_corrupt, is_loaded, transfers)


def _changed(worker: Worker) -> Kept | None:
    """What other engines have changed of what this rank keeps, and what went between them."""
    if (offload := worker.offload) is None:
        return None
    (added, removed), transfers = offload.take_names(), offload.take_transfers()
    if not added and not removed and transfers is None:
        return None
    return Kept(added, removed, offload.num_corrupt, transfers=transfers)


def digest_of(output: ModelRunnerOutput, drafts: tuple[list[int], list[int]] = ([], [])) -> int:
    """A checksum of what is the same on all ranks if they have the same logits. drafts: columns of
    StepDone.
    """
    pooled = [(one.slot, bytes(one.values.data)) for one in output.pooled]
    of_rows = output.num_sampled, output.token_ids, sorted(output.errors), output.num_ahead
    decided = *of_rows, drafts, pooled
    return zlib.crc32(msgspec.msgpack.encode(decided))


def _answer(number: int, done: Future[Any]) -> Answer:
    if (error := done.exception()) is not None:
        return Answer(number, pack_exception(error))
    return Answer(number, value=done.result() or "")


def share_cores(rank: int, size: int) -> int:
    """Keeps this process on its share of the cores, which are neighbours, unless there are fewer
    cores than ranks. Returns the number of threads that it should have.
    """
    num_threads = max(1, available_cores() // size)  # by a quota, which the affinity does not show
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= size:
        own = cores[len(cores) * rank // size : len(cores) * (rank + 1) // size]
        os.sched_setaffinity(0, own)
    return num_threads


def with_threads(config: EngineConfig, num_threads: int) -> EngineConfig:
    """num_threads counts the threads of one rank. By default ranks share the cores."""
    device = config.device_config
    if device.num_threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config
    device = msgspec.structs.replace(device, num_threads=num_threads)
    return msgspec.structs.replace(config, device_config=device)


def main(argv: list[str] | None = None) -> None:
    """The program. It ends with its engine."""
    parser = argparse.ArgumentParser(
        prog="quire.executor.ranks.rank", description="Runs one rank. Started by an engine."
    )
    parser.add_argument("--ends", required=True, help="what it inherits, as JSON")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--key-fd", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.WARNING)
    parser.add_argument("--log-format", choices=FORMATS, default="text")
    parser.add_argument("--log-model", default="")
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    read_key(args.key_fd, 1)
    configure_logging(args.log_level, args.log_format, args.log_model)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    platform_tuning.begin_start()
    ends = msgspec.json.decode(args.ends, type=RankEnds)
    Rank(SharedLinks(ends), share_cores(ends.rank, ends.size)).run()


if __name__ == "__main__":
    main()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)  # the interpreter's shutdown takes seconds with torch loaded
