"""What the backends that Triton compiles share: launches, descriptors, arguments, constants."""
