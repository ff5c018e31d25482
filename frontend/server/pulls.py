"""Models that clients download and delete while a server with several models runs: one download per
name, which all clients that ask for it share, and the slot that it becomes.

Must not know: routes, how the hub is asked, when a model is loaded.

A download runs in a thread of its own, which posts its progress to the event loop. It ends early
when the last client that asked for it has left; what was received stays for the next download of
that name. Slots last as long as the server; files last until they are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from ...ipc.errors import ModelLoadError, QuireError
from ..model_info.model_pull import DownloadError, HubBlob, Wanted, find_wanted, pull
from ..model_info.model_removal import Removal, find_removal
from .http.errors import ENDS, ApiError, invalid
from .model_slot import ModelSlot
from .models import Downloads, Models
from .state import shutting_down

MAX_DOWNLOADS = 4  # at once
LINE_INTERVAL_S = 0.1  # at least, between two lines about progress
_PART = r"[A-Za-z0-9_][\w.-]*"
HUB_NAME = re.compile(rf"{_PART}/{_PART}(:{_PART}|(/{_PART})+\.gguf)?", re.ASCII)


class _Abandoned(QuireError):
    """Ends a download's thread: nobody waits for it any more."""


class Download:
    """One download. All attributes belong to the event loop; `begin` and `add` are called by the
    thread (see model_pull.PullProgress).
    """

    def __init__(self, name: str, settings: Downloads, num_models: int):
        self.name = name
        self.tenants: set[str] = set()
        self.num_waiting = 0  # clients
        self.wanted: Wanted | None = None
        self.parts: dict[str, int] = {}  # file name -> bytes that are there, in order
        self.is_received = False
        self.is_abandoned = False
        self._settings = settings
        self._num_models = num_models
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.done: asyncio.Future[ModelSlot] = self._loop.create_future()
        # A failure after everybody has left is not an error of the loop.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.thread = threading.Thread(target=self._run, name=f"pull {name}", daemon=True)

    def abandon(self, error: ApiError | None = None) -> None:
        """Ends the download at the next bytes that it receives."""
        self.is_abandoned = True
        self._end(error or _Abandoned(f"the download of {self.name!r} was abandoned"))

    async def lines(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields Ollama's lines about the progress, until the files are there. Raises what went
        wrong.
        """
        sent: dict[str, int] = {}
        has_begun = False
        while True:
            changed = self._changed
            if self.wanted is not None and not has_begun:
                has_begun = True
                yield {"status": "pulling manifest"}
            for line in self._progress(sent):
                yield line
            if self.is_received or self.done.done():
                break
            await changed.wait()
            await asyncio.sleep(LINE_INTERVAL_S if sent else 0)
        if not self.done.done() or self.done.exception() is None:
            yield {"status": "writing manifest"}
        await asyncio.shield(self.done)

    def _progress(self, sent: dict[str, int]) -> list[dict[str, Any]]:
        """Returns the lines about what has changed since `sent`, which is brought up to date."""
        lines = []
        blobs = {blob.name: blob for blob in self.wanted.blobs} if self.wanted is not None else {}
        for name, num_bytes in self.parts.items():
            if sent.get(name) != num_bytes:
                sent[name] = num_bytes
                lines.append(_line(blobs[name], num_bytes))
        return lines

    # ------------------------------------------------------------ called by the thread

    def begin(self, blob: HubBlob, num_bytes_there: int) -> None:
        self._advance(self.parts.__setitem__, blob.name, num_bytes_there)

    def add(self, num_bytes: int) -> None:
        def count() -> None:
            self.parts[next(reversed(self.parts))] += num_bytes

        self._advance(count)

    def _advance(self, change: Callable[..., None], *values: Any) -> None:
        if self.is_abandoned:
            raise _Abandoned(self.name)
        self._post(change, *values)

    def _run(self) -> None:
        settings = self._settings
        try:
            wanted = find_wanted(self.name, settings.revision)
            self._advance(setattr, self, "wanted", wanted)
            pull(wanted, self, revision=settings.revision, download_dir=settings.download_dir)
            self._advance(setattr, self, "is_received", True)
        except BaseException as error:
            self._post(self._end, _failed(self.name, error))
            return
        try:
            slot = settings.make_slot(self.name, self._num_models)
        except BaseException as error:
            self._post(self._end, _not_served(self.name, error))
            return
        self._post(self._end, slot)

    def _post(self, change: Callable[..., None], *values: Any) -> None:
        def run() -> None:
            change(*values)
            self._changed.set()
            self._changed = asyncio.Event()

        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(run)

    def _end(self, outcome: ModelSlot | BaseException) -> None:
        if self.done.done():
            return
        if isinstance(outcome, BaseException):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)
        self._changed.set()


class Pulls:
    """The downloads of a server, and the models that came of them.

    `models.downloads` is None where the operator does not allow them.
    """

    def __init__(self, models: Models):
        self._models = models
        self._downloads: dict[str, Download] = {}
        self._threads: list[threading.Thread] = []  # of abandoned downloads, too
        # The keys are the pulled models, and the values the tenants who asked for them.
        self._tenants: dict[str, set[str]] = {}
        models.at_drain.append(self._end_all)

    async def pull(self, name: str, tenant: str) -> AsyncGenerator[dict[str, Any], None]:
        """Downloads a model, whose name is one of the hub, and adds its slot; yields the lines
        that Ollama sends meanwhile. What the server has is only confirmed.

        Raises ApiError. Closing the generator leaves the download.
        """
        if self._is_served(name):
            if name in self._tenants:
                self._tenants[name].add(tenant)
            yield {"status": "pulling manifest"}
        else:
            download = self._join(name)
            download.tenants.add(tenant)
            download.num_waiting += 1
            try:
                async with contextlib.aclosing(download.lines()) as lines:
                    async for line in lines:
                        yield line
            finally:
                download.num_waiting -= 1
                if not download.num_waiting and not download.done.done():
                    download.abandon()
        yield {"status": "success"}

    def _is_served(self, name: str) -> bool:
        slots = self._models.slots
        return name in slots or any(s.state.loras.get(name) is not None for s in slots.values())

    def _join(self, name: str) -> Download:
        settings = self._models.downloads
        if settings is None:
            raise not_allowed_to_pull(name)
        check_hub_name(name)
        if self._models.is_draining:
            raise shutting_down()
        if (running := self._downloads.get(name)) is not None:
            return running
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_DOWNLOADS:
            raise ApiError(
                429,
                f"{len(self._threads)} models are being downloaded, the most that may be at once.",
                code="rate_limit_exceeded",
                retry_after_s=30.0,
            )
        download = Download(name, settings, len(self._models.slots) + 1)
        self._downloads[name] = download
        download.done.add_done_callback(lambda done: self._ended(download))
        self._threads.append(download.thread)
        download.thread.start()
        return download

    def _ended(self, download: Download) -> None:
        del self._downloads[download.name]
        if download.done.exception() is not None:
            return
        self._models.add(download.done.result())
        self._tenants[download.name] = download.tenants

    def _end_all(self) -> None:
        for download in self._downloads.values():
            download.abandon(shutting_down())

    async def delete(self, name: str, tenant: str) -> None:
        """Removes the files and the slot of a model that clients have pulled.

        Raises ApiError for any other model, and for one that is in use or that another key has
        pulled.
        """
        settings = self._models.downloads
        if settings is None:
            raise changes_disabled()
        removal = None
        if name in self._tenants:
            with contextlib.suppress(ModelLoadError):  # the operator has removed the files
                removal = await asyncio.to_thread(find_removal, name, settings.download_dir)
        slot = self._check_removable(name, tenant)
        if removal is not None:
            self._check_alone(slot, removal)
        del self._tenants[name]
        await self._models.remove(slot)
        if removal is not None:
            await asyncio.to_thread(removal.run)

    def _check_removable(self, name: str, tenant: str) -> ModelSlot:
        """Returns the slot. Nothing is awaited between this check and the removal of the slot."""
        if name in self._downloads:
            raise ApiError(409, f"The model {name!r} is being downloaded.", code="model_in_use")
        slot = self._models.slots.get(name)
        if slot is None:
            raise self._models.unknown(name)
        if name not in self._tenants:
            raise ApiError(
                403,
                f"The model {name!r} was given at the server's start and is not deleted while it "
                "runs.",
                code="model_not_deletable",
            )
        if self._tenants[name] - {tenant}:
            message = f"The model {name!r} was also pulled with another API key."
            raise ApiError(403, message, code="model_not_deletable")
        if slot.num_users or slot.phase in ("loading", "leaving"):
            raise ApiError(409, f"The model {name!r} is in use.", code="model_in_use")
        return slot

    def _check_alone(self, slot: ModelSlot, removal: Removal) -> None:
        """Raises ApiError if another model of this server is in the files that would go."""
        going = [_place(path) for path in removal.paths]
        for other in self._models.slots.values():
            files = _place(Path(other.config.model_config.model))
            if other is not slot and any(files.is_relative_to(path) for path in going):
                message = f"The model {slot.name!r} shares its files with {other.name!r}."
                raise ApiError(409, message, code="model_in_use")


def check_hub_name(name: str) -> None:
    """Raises ApiError for a name that is not one of the hub."""
    if HUB_NAME.fullmatch(name):
        return
    if re.fullmatch(rf"{_PART}(:{_PART})?|registry\.ollama\.ai/.*", name, re.ASCII):
        problem = "is a name of Ollama's library, from which this server downloads nothing"
    else:
        problem = "is not a name on the Hugging Face hub"
    raise invalid(
        "model",
        f"{name!r:.200} {problem}. Write the name of a repository of the Hugging Face hub, as "
        "hf.co/ORG/NAME or hf.co/ORG/NAME:Q4_K_M.",
        "invalid_model_name",
    )


def not_allowed_to_pull(name: str) -> ApiError:
    return ApiError(
        404,
        f"This server does not have {name!r:.100}, and downloads no models while it runs. `quire "
        f"serve --allow-model-changes` lets clients download them; `quire pull NAME` downloads "
        f"one, and `quire serve NAME` serves it.",
        code="model_not_found",
        param="model",
    )


def changes_disabled() -> ApiError:
    return ApiError(
        403,
        "Clients delete no models of this server. `quire serve --allow-model-changes` lets them "
        "delete what they have pulled; `quire models remove NAME` deletes any.",
        code="model_changes_disabled",
    )


def _line(blob: HubBlob, num_bytes: int) -> dict[str, Any]:
    kind = "sha256" if len(blob.checksum) == 64 else "sha1"
    return {
        "status": f"pulling {blob.checksum[:12]}",
        "digest": f"{kind}:{blob.checksum}",
        "total": blob.num_bytes,
        "completed": num_bytes,
    }


def _failed(name: str, error: BaseException) -> BaseException:
    """Returns what clients learn of a download that failed."""
    if isinstance(error, (_Abandoned, *ENDS)):
        return error
    if isinstance(error, DownloadError):
        return ApiError(503, f"{error}.", code="download_failed")
    if isinstance(error, ModelLoadError):
        return ApiError(404, f"{error}.", code="model_not_found", param="model")
    if isinstance(error, OSError):
        message = f"model {name!r} could not be written: {error.strerror or error}."
        return ApiError(503, message, code="download_failed")
    return error  # for the log; clients learn that it is there


def _not_served(name: str, error: BaseException) -> BaseException:
    """Returns what clients learn of a model whose files are there."""
    if not isinstance(error, QuireError):
        return error
    message = f"The model {name!r} was downloaded and cannot be served: {error}."
    return ApiError(400, message, code="unsupported_model", param="model")


def _place(path: Path) -> Path:
    """Returns the absolute path of a file or link in the cache. A link itself is kept."""
    return path.parent.resolve() / path.name
