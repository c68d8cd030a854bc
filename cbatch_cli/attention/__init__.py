"""Attention over a paged KV cache. Tensors only: no request is known here."""
