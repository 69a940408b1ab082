FILE = "see.py"
