"""Prometheus and Flower."""
