"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one AsyncLLM.

Must not know: messages, sockets of the engine, torch.
"""
