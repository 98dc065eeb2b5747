"""What is fuzzed: the modules beside this one that have `one_input`, and how many inputs the default run gives each."""

TARGETS = {
    "frames": 1000,
    "requests_by_zmq": 200,
    "http_bytes": 250,
    "http_bodies": 500,
    "model_configs": 300,
    "weight_files": 700,
    "text_files": 400,
    "command_lines": 250,
}
