"""The HTTP server: OpenAI's API and its relatives over one AsyncLLM.
May know: the frontend's public classes, starlette, uvicorn, prometheus-client.
Must not know: messages, sockets of the engine, torch."""
