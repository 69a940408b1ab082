"""Policy files: reading YAML, JSON and dicts, and writing YAML."""
