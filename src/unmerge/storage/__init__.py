"""Files that appear whole or not at all, and checksums that say what they hold."""
