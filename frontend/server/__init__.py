"""The HTTP server: OpenAI's API and its relatives over one AsyncLLM.

Must not know: messages, sockets of the engine, torch.
"""
