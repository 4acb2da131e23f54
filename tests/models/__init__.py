"""Models that the tests make themselves: random weights, a tokenizer of single characters."""
