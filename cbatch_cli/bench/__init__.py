"""Throughput runs: a workload, the schedulers and transformers' own `generate` side by side."""
