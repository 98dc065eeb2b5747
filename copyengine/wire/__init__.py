"""The transport all processes use: codec, rpc, errors, process lifecycle, event loop, command line. No torch."""
