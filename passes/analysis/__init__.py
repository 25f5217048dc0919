"""Facts about a graph: analyses compute them and never edit."""
