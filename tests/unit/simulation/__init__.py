"""A fleet of consumers against a model of the server, in virtual time."""
