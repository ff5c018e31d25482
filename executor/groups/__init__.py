"""The groups of ranks that have parts of one model, as its layers see them.

`tensor_group.py` adds and joins tensors of ranks that share layers, `stages.py` is for those that
share the stack, and `expert_group.py` for engines that share experts. `ranks/` starts ranks and
carries the tensors of the first two; torch.distributed carries those of experts, in the groups that
`process_group.py` makes.
"""

PART_FLOATS = 2**20  # of an exchange of tensors; larger ones go in pieces
