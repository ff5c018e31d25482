"""Turns hidden states into embeddings, scores and classes. `pooler.py` collects a request's rows
over its chunks, in modes (`modes.py`), and applies heads (`heads.py`, `dense.py`).

Must not know: requests beyond their slot, models, files.
"""
