"""Random cases for the engine, each named by one number, and an independent reference to judge what it does."""
