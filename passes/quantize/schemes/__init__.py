"""Write a plan into the graph: dynamic, static and weight-only."""
