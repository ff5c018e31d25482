"""Turns logits into tokens: logits stages with penalties, grammars and processors, sampling, and
log-probabilities.
"""
