return 128 * row + 16 * (piece ^ row % 8);
