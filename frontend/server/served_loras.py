"""ServedLoras: the LoRA adapters that requests may name as their `model`.

Must not know: HTTP beyond the errors that it raises, the files of an adapter, which are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.lora import LoRARequest
from ..requests.lora_requests import placed
from .http.errors import ApiError, invalid, refused, unsupported

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter of the command line. vLLM's `base_model_name` has no effect."""

    name: str
    path: str
    base_model_name: str | None = None


class ServedLoras:
    """`by_name` tells what each name stands for. It stays when the engine is replaced or ended: the
    engine reads an adapter when a request uses it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, LoRARequest] = {}

    def get(self, name: str | None) -> LoRARequest | None:
        return self.by_name.get(name) if name else None

    async def load_modules(self, engine: AsyncLLM, modules: Sequence[str]) -> None:
        """Loads the adapters of --lora-modules. Raises InvalidParameterError."""
        for module in parse_modules(modules):
            request = make_request(module.name, module.path)
            try:
                await engine.add_lora(request)
            except InvalidParameterError as error:
                raise InvalidParameterError("lora_modules", f"{module.name}: {error}") from None
            self.by_name[module.name] = request

    async def load(
        self, engine: AsyncLLM, base: str, name: str, path: str, *, load_inplace: bool
    ) -> None:
        """Loads an adapter while the server runs. Raises ApiError; then nothing has changed."""
        if not engine.config.lora_config.enable_lora:
            raise unsupported("lora_name", "This server was started without --enable-lora.")
        if name == base:
            raise invalid("lora_name", f"'lora_name' must differ from the model's, {base!r}.")
        known = self.by_name.get(name)
        if known is not None and not load_inplace:
            message = (
                f"The LoRA adapter {name!r} has already been loaded. 'load_inplace' loads it again."
            )
            raise invalid("lora_name", message, "lora_already_loaded")
        try:
            request = make_request(name, path, load_inplace=load_inplace)
            await engine.add_lora(request)
        except InvalidParameterError as error:
            raise refused(error.parameter, error.problem, {"lora_request": "lora_path"}) from None
        self.by_name[name] = msgspec.structs.replace(request, load_inplace=False)
        if known is not None and known.lora_int_id != request.lora_int_id:
            await engine.remove_lora(known.lora_int_id)

    async def unload(self, engine: AsyncLLM, name: str, lora_int_id: int | None = None) -> None:
        """Forgets an adapter. Its requests finish. Raises ApiError 404 if there is none."""
        known = self.by_name.get(name)
        if known is None or lora_int_id not in (None, known.lora_int_id):
            param = "lora_name" if known is None else "lora_int_id"
            message = f"The LoRA adapter {name!r:.300} cannot be found."
            raise ApiError(404, message, code="lora_not_found", param=param)
        del self.by_name[name]
        await engine.remove_lora(known.lora_int_id)


def make_request(name: str, path: str, *, load_inplace: bool = False) -> LoRARequest:
    """Makes the request for an adapter. Its id follows from name and path, so that servers of one
    daemon do not contradict each other, and an adapter keeps it when a server starts again.
    """
    request = placed(LoRARequest(name, 1, path, load_inplace))
    digest = blake2b(f"{name}\0{request.lora_path}".encode(), digest_size=6).digest()
    return msgspec.structs.replace(request, lora_int_id=1 + int.from_bytes(digest))


def parse_modules(modules: Sequence[str]) -> list[LoraModule]:
    """Parses name=path, or vLLM's JSON object. Raises InvalidParameterError."""
    found = []
    for text in modules:
        try:
            if text.lstrip().startswith("{"):
                found.append(msgspec.json.decode(text, type=LoraModule))
            else:
                name, equals, path = text.partition("=")
                if not (name and equals and path):
                    raise ValueError("must be NAME=PATH")
                found.append(LoraModule(name, str(Path(path).expanduser())))
        except ValueError as error:
            raise InvalidParameterError("lora_modules", f"{error}, got {text!r:.200}") from None
    names = [module.name for module in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidParameterError("lora_modules", f"{name} is there twice")
    return found
