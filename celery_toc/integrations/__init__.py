"""For other programs: a Prometheus exporter, and the broker page of Flower."""
