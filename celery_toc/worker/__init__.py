"""The bootstep of a worker whose broker is a timeout center, and its parts."""
