"""URLs, options and connections to Redis: one server, Sentinel, Cluster, TLS, embedded."""
