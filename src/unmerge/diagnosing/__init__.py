"""Whether a request can work, before anything is edited."""
