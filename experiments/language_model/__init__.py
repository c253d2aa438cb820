"""A language model of bytes with dense or block-sparse causal attention."""
