"""Runs a step.

Slots of requests (`input_batch.py`), inputs (`step_inputs.py`), the model runner, bursts, and on a
GPU device state, launched steps and CUDA graphs. `stage_step.py`: steps of a stage before
the last one. `speculation/` drafts tokens and verifies them.
"""
