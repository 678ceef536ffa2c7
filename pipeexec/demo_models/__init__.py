"""Networks and data for demos, tests and benchmarks."""
