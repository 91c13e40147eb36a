"""Network -> Network: each pass is one small function; `pipeline.py` puts them in order."""
