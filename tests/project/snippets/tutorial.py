KEEPS = True  # it is one session
