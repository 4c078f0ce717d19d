"""Header names that our processes agree on, as lower-case bytes."""

REQUEST_ID = b"x-request-id"
PROCESSING_MS = b"openai-processing-ms"
RETRY_AFTER = b"retry-after"

# The served version, with `+epoch` once the replica has swapped: `base`, `v2+1` (see status.checkpoint_label).
CHECKPOINT = b"x-intellect-checkpoint"
# Which replica answered; only sent when the router runs with debug headers on.
REPLICA = b"x-intellect-replica"
# Opens the engine's development routes (server.guard).
ENGINE_TOKEN = b"x-intellect-engine-token"
