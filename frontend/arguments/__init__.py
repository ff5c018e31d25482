"""Names of arguments: `engine_arguments.py` types the keyword arguments of LLM and EngineArgs,
`vllm_arguments.py` lists vLLM's that Quire does not have.
"""
