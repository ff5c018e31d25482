"""A logits processor of your own: requests that ask for it write no word twice in a row.

The engine imports the factory by name, so this module is both program and processor.
"""

import itertools
import os
import sys
from pathlib import Path

import torch
from quire import LLM, SamplingParams


def no_immediate_repeat(params: SamplingParams):
    """The factory: called once per request, in the engine's process."""
    if not (params.extra_args or {}).get("no_immediate_repeat"):
        return None  # this request does not want it

    def processor(
        prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """logits [vocab_size] f32; what it returns goes on to penalties and the draw."""
        last = (prompt_token_ids + output_token_ids)[-1]
        logits[last] = -torch.inf
        return logits

    return processor


def main() -> None:
    # the engine's process must be able to import this module
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    prompt = "Tom ran and ran and ran and ran"
    repeats: dict[bool, int] = {}
    with LLM(logits_processors=["logits_processor:no_immediate_repeat"]) as llm:
        for wanted in (False, True):
            params = SamplingParams(
                temperature=0, max_tokens=24, extra_args={"no_immediate_repeat": wanted}
            )
            [output] = llm.generate(prompt, params, use_tqdm=False)
            token_ids = output.outputs[0].token_ids
            repeats[wanted] = sum(a == b for a, b in itertools.pairwise(token_ids))
            text = output.outputs[0].text
            print(f"no_immediate_repeat={wanted}: {text!r}, {repeats[wanted]} immediate repeats")
    if not repeats[False]:
        sys.exit(
            "this model repeats nothing here, so that the processor's effect is not to be seen"
        )
    if repeats[True]:
        sys.exit("the processor did not run")


if __name__ == "__main__":
    main()
