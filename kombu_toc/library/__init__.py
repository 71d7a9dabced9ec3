"""The task library: a record in SQL behind Redis. It needs the extra ``library``."""
