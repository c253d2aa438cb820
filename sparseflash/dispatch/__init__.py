"""From the arguments of a call to the backend that runs it."""
