"""Runs a step.

`assembly.py` builds what runs steps: a `ModelRunner` with a step of some kind. There are plain
steps (`plain_step.py`), steps that look ahead (`look_ahead.py`, `bursts.py`), steps that are
launched on a GPU (`launched_steps.py`, `device_inputs.py`, `cuda_graphs.py`), and those of a stage
before the last one (`stage_step.py`). `speculation/` drafts tokens and verifies them.
"""
