"""What a router costs, ours and others in one run: CPU per request and per streamed chunk, added latency, memory per stream.

`python -m loadtests.overhead --help`; the results are in docs/benchmarks.md.
"""
