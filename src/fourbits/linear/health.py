"""stub"""
def described(states):
    return ()
