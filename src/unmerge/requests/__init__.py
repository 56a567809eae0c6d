"""From what `fit` is given to a request: data are read here, and nowhere after it."""
