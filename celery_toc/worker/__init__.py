"""What a worker gains whose broker is a timeout center."""
