"""How much memory a request takes."""
