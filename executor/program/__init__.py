"""Records a model's step as one list of native calls."""
