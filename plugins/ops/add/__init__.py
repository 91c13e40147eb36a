"""The sum of two activations, where no operator that reads it adds it itself."""
