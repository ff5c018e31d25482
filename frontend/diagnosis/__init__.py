"""The checks of `quire doctor`: of the machine, the plugins and a model, before anything is loaded.
Each passes, warns or fails, with advice.
"""
