"""The worker: owns one device, runs the model on it and admits experts into its slot pool."""
