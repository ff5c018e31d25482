"""Which requests run in a step.

`scheduler.py` owns the requests; `running.py` and `waiting.py` fill a step, `results.py` applies
its output, `admission.py` and `preemption.py` decide who starts and who is preempted.
"""
