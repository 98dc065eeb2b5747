"""Memory that two processes share, copies into it and flags in it: one module per backend."""
