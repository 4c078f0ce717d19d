"""The command line `intellect` and the local stack. Joins the other packages; has no serving logic of its own."""
