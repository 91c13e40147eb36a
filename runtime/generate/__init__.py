"""From logits to committed tokens: sampling, acceptance, stops."""
