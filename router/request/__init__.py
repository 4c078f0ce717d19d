"""What a request's body says, and what the engine gets of it. Pure."""
