"""Rows in and answers out: sources, the typed columns between, and the Parquet sink."""
