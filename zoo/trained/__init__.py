"""Models with trained weights, judged by their tasks."""
