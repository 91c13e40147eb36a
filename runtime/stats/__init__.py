"""Statistics: steps, requests, memory."""
