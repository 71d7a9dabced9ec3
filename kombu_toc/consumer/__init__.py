"""How a process waits for messages and holds them: claims, due times, leases."""
