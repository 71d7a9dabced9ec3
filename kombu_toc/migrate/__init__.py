"""Moves a broker's tasks from Kombu's ``redis://`` and back."""
