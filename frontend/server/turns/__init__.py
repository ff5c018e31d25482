"""From a checked body to the deltas of its answer, the same for all APIs: sampling parameters and
the format of the response, the rendered and tokenized chat, the run, and what answers share.

Must not know: the APIs.
"""
