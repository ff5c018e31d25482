"""What the files of a model say: configuration, weight names and shapes, GGUF, quantized formats,
and the memory that the model needs.

Must not know: tensors' values, torch, layers.
"""
