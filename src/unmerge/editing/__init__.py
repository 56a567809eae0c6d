"""Edits: applied, reverted, saved, composed, and as strong as they need to be."""
