"""Build mode lookahead_decoding: room for a window and for guesses; the engine needs no head."""
