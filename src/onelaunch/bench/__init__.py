"""Measure: benchmark cases, each with its peers and its correctness check."""
