FILE = "example.py"
