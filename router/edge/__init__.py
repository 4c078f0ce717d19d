"""All of the router's I/O: engines, agents, clients' connections, metrics and logs."""
