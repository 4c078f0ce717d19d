"""The traffic that placement policies are compared on. `catalogue.SCENARIOS` lists it."""
