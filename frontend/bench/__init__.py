"""`quire bench`: load for any server of the OpenAI API and for the offline engine, measured and
reported.

Must not know: what is particular to our own server, messages, torch.
"""
