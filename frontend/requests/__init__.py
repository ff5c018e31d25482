"""A request on its way through the frontend.

`input_processor.py` checks and tokenizes it. `output_processor.py` converts the engine's rows to
outputs, with `request_state.py` and `logprobs.py`. `request_stream.py` hands outputs to a
coroutine. `beam_search.py` makes one search out of many requests.
"""
