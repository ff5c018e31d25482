"""Arguments of other engines that Quire does not have, the checks of speculative_config, and
numbers with units as text.
"""
