"""Header names that our processes agree on, as lower-case bytes."""

REQUEST_ID = b"x-request-id"
PROCESSING_MS = b"openai-processing-ms"
RETRY_AFTER = b"retry-after"

# The served version, with `+epoch` once the replica has swapped: `base`, `v2+1` (see status.checkpoint_label).
CHECKPOINT = b"x-intellect-checkpoint"
# Which replica answered; only sent when the router runs with debug headers on.
REPLICA = b"x-intellect-replica"
# Why that one, in predicted milliseconds; with the same.
DECISION = b"x-intellect-decision"
# Opens the engine's development routes (server.guard).
ENGINE_TOKEN = b"x-intellect-engine-token"
# The client's word which requests belong together, so that one replica's cache serves them all.
SESSION_ID = b"x-session-id"
# interactive, default or batch.
PRIORITY = b"x-intellect-priority"
# vLLM's: which of the data-parallel ranks behind its port takes the request.
DATA_PARALLEL_RANK = b"x-data-parallel-rank"
