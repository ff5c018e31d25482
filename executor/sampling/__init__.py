"""From logits to tokens: stages, penalties, grammars, processors, the draw, log-probabilities."""
