"""Exercise 12. One causal sequence on several ranks: who holds which tokens, so that all have the same work.

Query i of a causal sequence sees i + 1 keys. Cut the sequence into 2 P chunks: chunk c is tokens c n // (2 P) up to
(c + 1) n // (2 P) - 1, divisions rounded down. With "contiguous" rank r of P holds chunks 2 r and 2 r + 1; with
"zigzag" it holds chunks r and 2 P - 1 - r.

    python docs/learn/exercises/12_zigzag.py
"""

from judging import close, main, require

TO_WRITE = ("tokens_of", "work_of")


def tokens_of(rank, ranks, n, layout):
    """The tokens of a rank in ascending order, as a list."""
    raise NotImplementedError("tokens_of(rank, ranks, n, layout)")


def work_of(rank, ranks, n, layout):
    """The pairs of query and key that a rank computes: of its own queries, under a causal mask."""
    raise NotImplementedError("work_of(rank, ranks, n, layout)")


# ---- the judge ----


def judge(tokens_of, work_of):
    for rank, ranks, n, layout, expected in (
        (0, 2, 8, "zigzag", [0, 1, 6, 7]),
        (1, 2, 7, "zigzag", [1, 2, 3, 4]),
        (1, 3, 10, "contiguous", [3, 4, 5]),
    ):
        got = [int(token) for token in tokens_of(rank, ranks, n, layout)]
        require(got == expected, f"rank {rank} of {ranks}, {n} tokens, {layout}: got {got}, expected {expected}")
    for layout in ("contiguous", "zigzag"):
        for ranks in (1, 2, 3, 4, 8):
            for n in (0, 1, 5, 24, 1001, 4096):
                call = f"{ranks} ranks, {n} tokens, {layout}"
                held = [list(tokens_of(rank, ranks, n, layout)) for rank in range(ranks)]
                require(sorted(sum(held, [])) == list(range(n)), f"{call}: not every token is held once")
                require(all(tokens == sorted(tokens) for tokens in held), f"{call}: the tokens of a rank do not ascend")
                shares = [work_of(rank, ranks, n, layout) for rank in range(ranks)]
                close(f"{call}: work", shares, [sum(i + 1 for i in tokens) for tokens in held], 0)
    balance = {}
    for layout in ("contiguous", "zigzag"):
        shares = [work_of(rank, 4, 4096, layout) for rank in range(4)]
        balance[layout] = max(shares) * 4 / sum(shares)  # 1: nobody waits
    close("how long the last of 4 ranks works, contiguous", balance["contiguous"], 1.75, 0.001)
    close("the same, zigzag", balance["zigzag"], 1.0, 0.001)


if __name__ == "__main__":
    main(globals())
