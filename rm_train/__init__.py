"""Preference pairs in, checkpoint and report out. The command is ``rm-train``; import from the modules."""
