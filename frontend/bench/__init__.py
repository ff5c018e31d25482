"""`quire bench`: load for any server of the OpenAI API and for the offline engine, and its report.

Must not know: what is specific to Quire's server, messages, torch.
"""
