"""The LoRA adapters of one rank.

Must not know: which adapters should be in memory, requests, names that users give.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from ..ipc.config import LoRAConfig
from ..ipc.errors import InvalidParameterError, ModelLoadError
from ..ipc.lora import LoRARequest
from .model import Model
from .models.adapters import EmbeddingAdapters, LinearAdapters, Modules
from .weights.lora_files import Adapted, AdapterWeights, inner_name, read_adapter, stamp_of
from .weights.table import layer_of

Adapter = dict[str, AdapterWeights]  # by the name of the module


def start_reader() -> ThreadPoolExecutor:
    """Returns a thread that reads adapters beside steps. torch gets no further threads in it: they
    would take the cores of the native kernels, and would look for work a while longer.
    """

    def settle() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # from now on this thread keeps its number

    num_threads = torch.get_num_threads()
    reader = ThreadPoolExecutor(1, thread_name_prefix="quire-lora", initializer=settle)
    reader.submit(int).result()
    torch.set_num_threads(num_threads)  # of all others
    return reader


class Loras:
    """Reads adapters, and owns those that requests can use. The core numbers them; see Executor.

    They stay when the model is replaced (Worker.load_weights), and when it sleeps and wakes up.
    Those that slots use are also in the memory of the model's layers, each in one of `max_loras`
    places. An adapter keeps its place until another one needs it.
    """

    def __init__(self, config: LoRAConfig, dtype: torch.dtype):
        self._config = config
        self._dtype = dtype
        self._adapters: dict[int, Adapter] = {}  # by number
        self._modules: Modules = {}  # of the model, like the next field
        self._layers: list[LinearAdapters | EmbeddingAdapters] = []
        self._shapes: dict[str, Adapted] = {}
        self._heads = 0, 0
        self._is_elsewhere: Callable[[str], bool] = lambda name: False  # on another rank
        # by place: the number of the adapter there; the least recently used first
        self._places: dict[int, int | None] = {}
        self._users: dict[int, int] = {}  # slot -> the number of the adapter that it uses
        self._reader: ThreadPoolExecutor | None = None  # created by the first adapter
        self._read: dict[int, Future[Adapter]] = {}  # by number, until they are added

    @property
    def is_enabled(self) -> bool:
        return self._config.enable_lora

    def use_model(self, model: Model) -> None:
        """Takes the model's modules. Call it whenever the model has been replaced, before requests
        enter slots.
        """
        self._modules = model.adapted_modules
        self._layers = list(dict.fromkeys(of for of, _ in self._modules.values()))
        self._shapes = {name: of.adapted(i) for name, (of, i) in self._modules.items()}
        self._heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self._is_elsewhere = partial(is_on_another_rank, model)
        self._places = dict.fromkeys(range(self._config.max_loras))

    def read(self, request: LoRARequest) -> Adapter:
        """Reads and checks the files of an adapter. It may run in a thread, since it changes
        nothing that a step uses. Raises InvalidParameterError.
        """
        if not self.is_enabled:
            raise InvalidParameterError("lora_request", "needs an engine with enable_lora=True")
        try:
            return read_adapter(
                Path(request.lora_path),
                self._shapes,
                self._heads,
                self._config.max_lora_rank,
                self._dtype,
                self._is_elsewhere,
            )
        except ModelLoadError as error:
            raise InvalidParameterError("lora_path", str(error)) from error

    def begin_read(self, request: LoRARequest) -> Future[str]:
        """Reads an adapter in a thread, one at a time; see Executor.read_lora."""
        if self._reader is None:
            self._reader = start_reader()
        stamp: Future[str] = Future()

        def read() -> Adapter:
            try:
                files = stamp_of(request.lora_path)
                adapter = self.read(request)
            except BaseException as error:
                stamp.set_exception(error)
                raise
            stamp.set_result(files)
            return adapter

        self._read[request.lora_int_id] = self._reader.submit(read)
        return stamp

    def add_read(self, request: LoRARequest) -> bool:
        """Makes what `begin_read` has read usable as `request.lora_int_id`; see
        Executor.add_lora.
        """
        number = request.lora_int_id
        if number in self._adapters:
            return False
        if number not in self._read:
            self.begin_read(request)
        self.add(request, self._read.pop(number).result())
        return True

    def add(self, request: LoRARequest, adapter: Adapter) -> None:
        """Makes what `read` returned usable as `request.lora_int_id`. Call it between two steps."""
        self._adapters[request.lora_int_id] = adapter

    def shutdown(self) -> None:
        """Ends the thread that reads. It may be called twice."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = None
        self._read.clear()

    def remove(self, lora_int_id: int) -> bool:
        """Frees an adapter, read or added, that no slot uses. Call it between two steps. It returns
        False if there is no such adapter.
        """
        read = self._read.pop(lora_int_id, None)
        if read is not None:
            read.cancel()
        for place, number in self._places.items():
            if number == lora_int_id:
                self._places[place] = None
        return self._adapters.pop(lora_int_id, None) is not None or read is not None

    def list(self) -> set[int]:
        """The numbers of the adapters that were added."""
        return set(self._adapters)

    def enter(self, slot: int, lora_int_id: int) -> int:
        """Notes that a request of this adapter enters a slot, and returns the adapter's place.

        Raises InvalidParameterError for an adapter that was not added, and where other slots use
        all places.
        """
        if lora_int_id not in self._adapters:
            raise InvalidParameterError("lora_request", f"adapter {lora_int_id} is not loaded")
        place = next((p for p, number in self._places.items() if number == lora_int_id), None)
        if place is None:
            place = self._free_place()
            self._put(place, lora_int_id)
        self._users[slot] = lora_int_id
        self._touch(place)
        return place

    def leave(self, slot: int) -> None:
        """Notes that the slot is free."""
        number = self._users.pop(slot, None)
        for place, there in list(self._places.items()):
            if number is not None and there == number:
                self._touch(place)

    def _free_place(self) -> int:
        used = set(self._users.values())
        free = [place for place, number in self._places.items() if number not in used]
        if not free:
            raise InvalidParameterError(
                "max_loras", f"{len(self._places)} adapters are in use, and a request has another"
            )
        return next((place for place in free if self._places[place] is None), free[0])

    def _put(self, place: int, number: int) -> None:
        for adapters in self._layers:
            adapters.clear(place)
        for name, weights in self._adapters[number].items():
            adapters, index = self._modules[name]
            adapters.put(place, index, weights)
        self._places[place] = number

    def _touch(self, place: int) -> None:
        """Makes the place the most recently used one."""
        self._places[place] = self._places.pop(place)


def adapted_modules(model: Model) -> Modules:
    """The modules that have adapters, of a model that is not yet filled and whose LayerFactory has
    given adapters to layers. Experts and routers have none.
    """
    modules: Modules = {}
    heads: Modules = {}
    for name, tensor in model.weights():
        layer, module = layer_of(tensor), name.removesuffix(".weight")
        if tensor.dim() != 2 or layer is None or layer.adapters is None:
            continue
        if layer.tied_to is not None:
            ((head, _),) = layer.shards.items()
            heads[head] = layer.adapters, 0
            layer = layer.tied_to
        index = 0
        if isinstance(layer.adapters, LinearAdapters):
            # the shards of a model in transformers' code have their full names
            shards = list(layer.shards)
            index = shards.index(module if module in shards else module.rpartition(".")[2])
        modules[module] = layer.adapters, index
    return modules | heads


def is_on_another_rank(model: Model, module: str) -> bool:
    """Whether the layers of another stage have a module that an adapter names."""
    inner, config = inner_name(module), model.config
    names = module, f"{config.base_prefix}{inner}", f"{config.name_prefix}{inner}"
    return any(model.is_of_another_rank(f"{name}.weight") for name in names)


def explored_modules(model: Model) -> Modules:
    """The modules that see one row for each token of a step. Only a pass tells what transformers
    calls the modules of its models with.

    Call it for a model in transformers' code whose weights are loaded.
    """
    rows = model.adapter_rows
    assert rows is not None
    with rows.watched() as seen:
        num_tokens = model.explore()
    return {
        name: (adapters, index)
        for name, (adapters, index) in model.adapted_modules.items()
        if name == model.head_name or {*seen.get(adapters, ())} == {num_tokens}
    }
