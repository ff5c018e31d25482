"""Runs a step.

Slots of requests (`input_batch.py`), inputs (`step_inputs.py`), the model runner, bursts, and on a
GPU device state, launched steps and CUDA graphs. `speculation.py` verifies drafts, of which
`draft_depth.py` decides how many; `drafters.py` is the interface of what makes them: proposers,
which look texts up, a draft model, and a head.
"""
