"""Counters of what a process puts, delivers and loses, and how they reach Redis."""
