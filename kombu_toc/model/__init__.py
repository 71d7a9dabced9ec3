"""What the product reckons with: scores, topics, envelopes. Pure: no I/O, no clock, no Redis."""
