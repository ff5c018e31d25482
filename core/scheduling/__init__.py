"""Which requests run in a step: admission, the scheduler, the cost of preemption."""
