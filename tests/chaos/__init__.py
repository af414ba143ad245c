"""Delivery under faults: workers, Redis and databases that are killed, cut and stalled, and an audit of every row."""
