"""The continuous-batching engine: token ids in, token ids out."""
