"""Other libraries that attend with sparseflash."""
