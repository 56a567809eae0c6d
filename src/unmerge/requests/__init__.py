"""From what `fit` is given to a request: data are read here; after it only the verdict's random control is."""
