"""Several tokens of a request in one pass of the model.

`verification.py` verifies drafts, of which `draft_depth.py` decides how many. `drafters.py` is the
interface of what makes them: `proposers.py` and `suffix_proposer.py` look texts up; a draft model
(`draft_model.py`) and a head (`draft_head.py`) run passes of their own (`draft_passes.py`).
"""
