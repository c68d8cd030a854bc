"""Models: the only room that touches transformers' modelling code."""
