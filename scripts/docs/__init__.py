"""Pictures of the documentation, made from measured rows."""
