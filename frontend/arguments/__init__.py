"""Arguments of other engines that Quire does not have, and the checks of speculative_config."""
