def tokens_of(rank, ranks, n, layout):
    chunks = (rank, 2 * ranks - 1 - rank) if layout == "zigzag" else (2 * rank, 2 * rank + 1)
    return [token for chunk in chunks for token in range(chunk * n // (2 * ranks), (chunk + 1) * n // (2 * ranks))]


def work_of(rank, ranks, n, layout):
    return sum(token + 1 for token in tokens_of(rank, ranks, n, layout))
