"""How a request becomes an answer: read, placed, prompted, generated, streamed."""
