"""What results look like on a console. The only place that prints, besides `cli/`."""
