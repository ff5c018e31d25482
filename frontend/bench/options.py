"""The options of `quire bench serve` and of its workloads: each is a field with the placeholder and
the help of its flag; "rare": --help-all alone shows it (frontend/cli/parser.py).

Must not know: how a value is used, command lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ...ipc.checks import require

Dataset = Literal["random", "sharegpt", "prefix", "multi-turn"]


@dataclass(frozen=True)
class WorkloadOptions:
    dataset_name: Annotated[Dataset, "NAME", f"the workload: {', '.join(get_args(Dataset))}"] = (
        "random"
    )
    dataset_path: Annotated[
        str | None, "FILE", "file for sharegpt: ShareGPT's JSON, or JSON lines with a prompt each"
    ] = None
    num_prompts: Annotated[int, "N", "number of requests; for multi-turn: of conversations"] = 200
    input_len: Annotated[
        int, "N", "tokens of a prompt (words without --tokenizer); for multi-turn: per turn"
    ] = 512
    output_len: Annotated[
        int | None,
        "N",
        "maximum tokens of an answer [128; for sharegpt: as many as the file's answer]",
    ] = None
    range_ratio: Annotated[
        float, "X", "lengths are uniform between (1 - X) and (1 + X) times these"
    ] = 0.0
    prefix_len: Annotated[int, "N", "for prefix: number of shared tokens in a prompt", "rare"] = 256
    num_prefixes: Annotated[int, "N", "for prefix: number of different shared prefixes", "rare"] = 1
    num_turns: Annotated[int, "N", "for multi-turn: turns per conversation", "rare"] = 3
    token_ids: bool = False  # prompts as ids instead of text
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, num_prompts=self.num_prompts, input_len=self.input_len)
        require_at_least(0, prefix_len=self.prefix_len)
        require_at_least(1, num_prefixes=self.num_prefixes, num_turns=self.num_turns)
        if self.output_len is not None:
            require_at_least(1, output_len=self.output_len)
        require(
            0 <= self.range_ratio < 1,
            "--range-ratio",
            f"must be at least 0 and less than 1, got {self.range_ratio}",
        )
        require(
            (self.dataset_name == "sharegpt") == (self.dataset_path is not None),
            "--dataset-path",
            "goes with --dataset-name sharegpt, which needs it",
        )
        require(
            not self.token_ids or self.dataset_name != "multi-turn",
            "--token-ids",
            "goes with other datasets than multi-turn: what was answered comes back as text",
        )


def require_at_least(least: int, **values: int) -> None:
    """Raises InvalidParameterError for a value below `least`. `values` have the names of their
    flags.
    """
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        require(value >= least, option, f"must be at least {least}, got {value}")


@dataclass(frozen=True)
class ServeOptions:
    base_url: Annotated[str, "URL", "the server, with or without /v1"] = "http://127.0.0.1:8000"
    api_key: Annotated[str | None, "KEY", "API key [$OPENAI_API_KEY]"] = None
    ready_timeout_s: Annotated[
        float, "S", "seconds to wait for a server that is starting", "rare"
    ] = 0.0
    timeout_s: Annotated[float, "S", "timeout of a request in seconds", "rare"] = 3600.0
    request_rate: Annotated[float, "X", "requests per second; inf: all at once"] = float("inf")
    burstiness: Annotated[
        float,
        "X",
        "1: Poisson arrivals; below 1: bursts; above 1: more regular (gamma distribution)",
        "rare",
    ] = 1.0
    max_concurrency: Annotated[
        int | None, "N", "maximum number of concurrent requests [no limit]"
    ] = None
    num_warmups: Annotated[int, "N", "requests before the measurement", "rare"] = 1
    seed: Annotated[int, "N", "equal seeds produce equal prompts and arrival times", "rare"] = 0

    def __post_init__(self) -> None:
        for option, value in (
            ("--request-rate", self.request_rate),
            ("--burstiness", self.burstiness),
            ("--timeout", self.timeout_s),
        ):
            require(value > 0, option, f"must be greater than 0, got {value}")
        require(self.burstiness < float("inf"), "--burstiness", "must be finite, got inf")
        if self.max_concurrency is not None:
            require_at_least(1, max_concurrency=self.max_concurrency)
        require(self.num_warmups >= 0, "--num-warmups", "must be at least 0")
        require(self.ready_timeout_s >= 0, "--ready-timeout", "must be at least 0")
