"""Load on the running product: what it costs and what it stands. Nothing here is part of a deployment."""
