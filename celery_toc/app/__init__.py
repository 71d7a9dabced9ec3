"""What a program that sends tasks gains: the task center, revoke, results."""
