"""Long Range Arena and Path-X: tasks, floors, an encoder for any pattern, training, speed."""

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")  # of the arena
