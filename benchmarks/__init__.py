"""Benchmarks; each run writes one JSON file, named by hardware and date, to `results/`."""
