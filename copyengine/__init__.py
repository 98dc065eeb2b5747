"""The copy engine: owns disk and host memory, and copies expert records into the workers' slots."""
