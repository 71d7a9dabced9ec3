"""The Kombu adapter: how messages of Kombu come to the timeout center, and back."""
