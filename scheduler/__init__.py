"""The scheduler: owns requests and time, and never loads torch."""
