"""Plots and tables for what a run did."""
