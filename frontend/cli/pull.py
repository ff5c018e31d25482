"""`quire pull`: downloads a model from the hub, with a progress bar, and checks it.

Must not know: the hub's API, which files a model has, torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ..arguments.quantities import format_bytes
from .parser import Parser

if TYPE_CHECKING:
    from ..model_info.model_pull import HubBlob

USAGE = "NAME[:QUANT] [--revision NAME] [--download-dir DIR] [--verify] [--json]"
DESCRIPTION = (
    "Downloads a model from the Hugging Face hub into its cache: the files that Quire reads, or "
    "the one GGUF model of QUANT (Q4_K_M). After an interruption the same command continues. Each "
    "file is compared with the hub's checksum."
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("pull", USAGE, DESCRIPTION, argv)
    add, such = parser.add, "such as org/name, org/name:Q4_K_M or org/name/F.gguf"
    add("model", "NAME[:QUANT]", such, nargs="?")
    add("--revision", "NAME", "branch, tag or commit [main]")
    add("--download-dir", "DIR", "in place of the hub cache (HF_HOME)")
    add.switch("--verify", "compare the files in the cache too; damaged ones are downloaded again")
    add.switch("--json", "the result as one JSON object")
    return parser


def main(argv: list[str]) -> int:
    parser = make_parser(argv)
    args = parser.parse(argv)
    if args.model is None:
        parser.error("the name of a model on the hub is missing, such as org/name:Q4_K_M")
    from ..model_info.model_pull import find_wanted, pull

    wanted = find_wanted(args.model, args.revision)
    damaged: list[HubBlob] = []

    def report(blob: HubBlob) -> None:
        damaged.append(blob)
        print(f"quire: {blob.name} in the cache is damaged; downloading it again", file=sys.stderr)

    bar = DownloadBar(wanted.num_bytes)
    try:
        with bar:
            path = pull(
                wanted,
                bar,
                revision=args.revision,
                download_dir=args.download_dir,
                verify=args.verify,
                on_damaged=report,
            )
    except KeyboardInterrupt:
        received = format_bytes(bar.num_bytes_received)
        print(f"quire: interrupted; {received} received, the next pull continues", file=sys.stderr)
        raise
    result = {
        "model": wanted.model,
        "commit": wanted.commit,
        "path": str(path),
        "num_files": len(wanted.blobs),
        "num_bytes": wanted.num_bytes,
        "num_bytes_received": bar.num_bytes_received,
        "damaged": [blob.name for blob in damaged],
    }
    if args.json:
        print(msgspec.json.encode(result).decode())
        return 0
    is_new = ""
    if bar.num_bytes_received:
        rest = ", the rest was there already" * (bar.num_bytes_received < wanted.num_bytes)
        is_new = f"{format_bytes(bar.num_bytes_received)} received{rest}"
    checked = "all checksums are right" if args.verify else "it was there already"
    files = f"{len(wanted.blobs)} file" + "s" * (len(wanted.blobs) > 1)
    print(f"{wanted.model}: {files}, {format_bytes(wanted.num_bytes)}, {is_new or checked}: {path}")
    return 0


class DownloadBar:
    """A progress bar over all files on stderr, if that is a terminal."""

    def __init__(self, num_bytes: int):
        from tqdm import tqdm

        self.num_bytes_received = 0
        self._bar = tqdm(
            total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False
        )

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def begin(self, blob: HubBlob, num_bytes_there: int) -> None:
        self._bar.set_description(blob.name[-40:])
        self._bar.update(num_bytes_there)

    def add(self, num_bytes: int) -> None:
        self.num_bytes_received += num_bytes
        self._bar.update(num_bytes)
