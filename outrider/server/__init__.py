"""The server: clients of OpenAI's API ask, and the model answers them in the order of their requests."""
