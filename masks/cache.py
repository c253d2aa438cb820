"""What others store with a mask or a table for as long as it lives."""

MOST = 1024


class Cache(dict):
    """A bounded store, which begins anew when it is full. A copy of its owner begins with none."""

    def __setitem__(self, key, value):
        if len(self) >= MOST:
            self.clear()
        super().__setitem__(key, value)

    def __reduce__(self):
        return Cache, ()
