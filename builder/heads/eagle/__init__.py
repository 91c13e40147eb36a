"""An EAGLE head as a part of an engine: reading it, and the graphs that it is."""
