"""Which requests run in a step.

`state.py` owns the requests, `step.py` fills a step with them, and `results.py` applies its output.
`admission.py` and `preemption.py` decide where a request starts and which one is preempted,
`owners.py` whose turn it is, and `shares.py` what each owner may hold. `scheduler.py` calls them.
"""
