def offset(row, piece, pieces):
    line, slot = divmod(row * pieces + piece, 8)  # 128 bytes are all banks once
    turn = row if pieces >= 8 else line  # two rows of 4 pieces share a line
    return 128 * line + 16 * (slot ^ turn % 8) if pieces >= 8 else 128 * line + 16 * (slot ^ turn % 4)
