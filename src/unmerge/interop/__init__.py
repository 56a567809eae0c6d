"""An edit in the forms that other tools read."""
