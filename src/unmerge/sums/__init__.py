"""What is kept of a layer's inputs: count, mean and scatter of rows that arrive in pieces."""
