"""What is not about learning: devices, processes, files, messages."""
