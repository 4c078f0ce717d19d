"""One replica: the agent that launches and supervises an engine, and swaps its checkpoint.

The engine is vLLM or the simulated engine; both are reached over HTTP only. Nothing here imports vLLM or torch.
"""
