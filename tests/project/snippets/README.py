FILE = "example.py"
RESTARTS = True  # a block is copied by itself
