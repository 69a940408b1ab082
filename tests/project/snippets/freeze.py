KEEPS = True  # the model goes on being used
