"""For programs that send tasks: the task center, countdowns, revokes, the result backend."""
