"""The checks that `quire doctor` makes of the machine, the plugins and a model, before anything is
loaded. Each passes, warns or fails, with advice.
"""
