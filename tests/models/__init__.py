"""Models built by the tests: random weights, and a tokenizer of single characters."""
