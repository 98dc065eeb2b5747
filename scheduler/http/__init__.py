"""The HTTP front: OpenAI-compatible endpoints over `scheduler.client`, as a process of its own."""
