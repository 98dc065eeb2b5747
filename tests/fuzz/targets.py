"""What is fuzzed: the modules beside this one that have `one_input`, and how many inputs the default run gives each."""

TARGETS = {
    "frames": 400,
    "requests_by_zmq": 100,
    "http_bytes": 120,
    "http_bodies": 150,
    "model_configs": 150,
    "weight_files": 250,
    "text_files": 200,
    "command_lines": 150,
}
