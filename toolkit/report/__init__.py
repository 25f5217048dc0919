"""Results on a console or an HTML page. Only this package and `cli/` print."""
