"""From the statistics of a request to the low-rank change of each layer."""
