"""From hidden states to embeddings, scores and classes: `pooler.py` collects a request's rows over
its chunks.

Must not know: requests beyond their slot, models, files.
"""
