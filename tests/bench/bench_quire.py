"""Quire as one engine of the harness that compares engines.

    PEERS=DIR python tests/bench/bench_quire.py --model qwen05b --mode process --workloads W1,W2
    --reps 3

The harness is a folder with common.py, named by --peers or $PEERS.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.metadata import version

import psutil
from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, __version__


def harness():
    """The module `common` from the folder named by --peers or $PEERS."""
    folder = os.environ.get("PEERS", "")
    if "--peers" in sys.argv[1:-1]:
        at = sys.argv.index("--peers")
        folder = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    if not os.path.exists(os.path.join(folder, "common.py")):
        sys.exit(
            "bench_quire.py: name the folder that holds the harness's common.py with --peers DIR "
            "or $PEERS"
        )
    sys.path.insert(0, folder)
    import common

    return common


def make_adapter(common):
    class Quire(common.Engine):
        def load(self) -> None:
            args = self.args
            self.dtype = args.dtype or "bf16"
            self.version = f"quire {__version__} / torch {version('torch')} {args.mode}"
            given = {
                "max_num_batched_tokens": args.mbt,
                "quantization": args.quantization,
                "cpu_isa": args.isa,
            }
            engine_args = EngineArgs(
                common.MODELS[args.model]["dir"],
                dtype={"bf16": "bfloat16", "f32": "float32"}[self.dtype],
                max_model_len=args.max_model_len,
                num_threads=args.threads,
                skip_tokenizer_init=args.no_detok,
                disable_log_stats=True,
                **{name: value for name, value in given.items() if value is not None},
            )
            self.engine = LLMEngine.from_engine_args(engine_args, engine=args.mode)
            self.num_requests = 0

        def run(self, reqs: list) -> list[list[float]]:
            """Submits all requests at once; returns for each request the perf_counter time at which
            the caller received each token.
            """
            first, times = self.num_requests, [[] for _ in reqs]
            self.num_requests += len(reqs)
            for i, req in enumerate(reqs):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=req.n_out,
                    ignore_eos=True,
                    output_kind=RequestOutputKind.DELTA,
                    detokenize=not self.args.no_detok,
                )
                self.engine.add_request(str(first + i), {"prompt_token_ids": req.ids}, params)
            while self.engine.has_unfinished_requests():
                outputs, now = self.engine.step(), time.perf_counter()
                for output in outputs:
                    times[int(output.request_id) - first] += [now] * len(
                        output.outputs[0].token_ids
                    )
            return times

        def extra_pids(self) -> list[int]:
            return [child.pid for child in psutil.Process().children(recursive=True)]

        def close(self) -> None:
            self.engine.shutdown()

    return Quire


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=["inproc", "process"], default="process")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--mbt", type=int, default=None, help="max_num_batched_tokens")
    parser.add_argument(
        "--quantization", default=None, help="int8 or int4: of the weights, at load"
    )
    parser.add_argument(
        "--isa",
        default=None,
        help="the native kernels' instruction set (default: the best available)",
    )
    parser.add_argument("--no-detok", action="store_true", help="token ids only")


if __name__ == "__main__":
    common = harness()
    common.main(make_adapter(common), add_arguments, "quire")
