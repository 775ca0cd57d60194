"""Evaluation at many temperatures: what is drawn, from which seeds, how it is scored, and what is made of it."""
