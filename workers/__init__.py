"""What runs on a GPU node: the worker daemon and its engine."""
