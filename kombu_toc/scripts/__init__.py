"""The Lua scripts, one file an operation, their loader, and what a call of one is made of."""
