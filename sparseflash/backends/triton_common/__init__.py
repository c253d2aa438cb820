"""What the backends that Triton compiles share: launches, descriptors, arguments, constants, what
soft caps, score functions and biases make of S.
"""
