"""The router: one OpenAI-compatible endpoint over many replicas."""
