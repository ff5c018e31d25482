"""`quire bench embed`: its flags and its output.

Must not know: how an engine is reached, HTTP, torch.
"""

from __future__ import annotations

from ...ipc.errors import InvalidParameterError
from ..bench.workloads import WorkloadOptions, make_requests, require_at_least
from .bench_flags import add_json, write_report
from .bench_offline import open_llm
from .flags import ENGINE, engine_flags
from .parser import Parser
from .session import COMMON_ENGINE


def embed_parser(argv: list[str]) -> Parser:
    parser = Parser(
        "bench embed",
        "[--model NAME] [--batch-size N] [--input-len N] [engine flags]",
        "Embeds batches of texts one after the other, each text once, and reports texts and tokens "
        "per second.",
        argv,
    )
    add = parser.group("batch")
    add("--batch-size", "N", "texts per batch", 32)
    add("--input-len", "N", "tokens of each text, without the special ones", 32)
    add("--num-iters", "N", "measured batches", 20)
    add("--num-iters-warmup", "N", "batches before those", 2, rare=True)
    add_json(parser.group("run"))
    parser.add_flags("engine", [*engine_flags(), ENGINE], COMMON_ENGINE)
    return parser


def embed(argv: list[str]) -> int:
    args = embed_parser(argv).parse(argv)
    require_at_least(1, batch_size=args.batch_size, num_iters=args.num_iters)
    require_at_least(0, num_iters_warmup=args.num_iters_warmup)
    num_batches = args.num_iters_warmup + args.num_iters
    with open_llm(args) as llm:
        from ..bench.offline import run_embed
        from ..bench.report import milliseconds_table
        from ..bench.statistics import summarize

        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            problem = "the tokenizer is needed to generate texts"
            raise InvalidParameterError("skip_tokenizer_init", problem)
        options = WorkloadOptions(
            num_prompts=args.batch_size * num_batches,
            input_len=args.input_len,
            seed=getattr(args, "seed", 0),
        )
        texts = [str(request.prompt) for request in make_requests(options, tokenizer)]
        batches = [texts[i::num_batches] for i in range(num_batches)]
        run_embed(llm, batches[: args.num_iters_warmup])
        seconds, num_tokens = run_embed(llm, batches[args.num_iters_warmup :])
    summary = summarize(seconds)
    assert summary is not None  # there is at least one batch
    print(
        f"{args.num_iters} batches of {args.batch_size} texts, {num_tokens} tokens; ms\n\n"
        + "\n".join(milliseconds_table([("a batch", summary)]))
        + f"\n\n{args.batch_size / summary.percentiles[50]:.1f} texts/s (median), "
        f"{num_tokens / sum(seconds):.0f} tokens/s"
    )
    write_report(args, {"seconds": seconds, "num_tokens": num_tokens})
    return 0
