for (int tile = 0; tile < kStages - 1; ++tile) copy_tile(stages[tile], x, tile, tiles);
for (int tile = 0; tile < tiles; ++tile) {
    fa::cp_async_wait_group<kStages - 2>();  // this thread's part of `tile` has landed
    __syncthreads();                         // so has everybody's, and everybody is done with the stage that is copied into next
    const int next = tile + kStages - 1;
    copy_tile(stages[next % kStages], x, next, tiles);
    sum += work(stages[tile % kStages]);
}
