"""From logits to tokens: logits stages, penalties, grammars, processors, sampling, log-
probabilities.
"""
