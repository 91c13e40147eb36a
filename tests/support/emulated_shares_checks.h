// Checks of tree_shares.cuh and tree_tail.cuh, behind them. They return how many numbers are wrong.

// Of a work item: sums of a row and dimension, a row's largest logit and total.
DEVICE float sum_of(int unit, int row, int dimension) {
  return std::sin(7.0f * unit + 0.37f * row + 1.3f * dimension) * (1 + unit);
}
DEVICE float largest_of(int unit, int row) { return (5 * unit + row) % 7 - 3.0f; }
DEVICE float total_of(int unit, int row) { return 1.0f + (unit + row) % 5; }
DEVICE int dimension_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

struct Unit {
  float acc[SIZE / 2], largest[2], total[2];
  explicit Unit(int unit) {
    for (int i = 0; i < SIZE / 2; ++i) acc[i] = sum_of(unit, row_of(i / 2 % 2), dimension_of(i));
    for (int r = 0; r < 2; ++r) largest[r] = largest_of(unit, row_of(r)), total[r] = total_of(unit, row_of(r));
  }
};

// Blocks that share so many work items and go through `begun` tiles of the next, and wait at different places, against
// one after another.
extern "C" int check_merging(int units, int begun) {
  std::atomic<int> wrong{0};
  Barrier all(SPLITS * 128);
  run_blocks(SPLITS, SPLITS, 128, [&] {
    constexpr u32 BARRIERS = MEMORY_BYTES - 128;
    const int rank = blockIdx.x;
    if (threadIdx.x == 0) begin_barriers(BARRIERS);
    all.wait();
    Merging merging(0, 2 * SENT_BYTES, BARRIERS, rank, units);
    OwnTiles at(unit_start(units) + begun, units, rank);
    for (int tile = 0; tile < begun; ++tile) {  // the root's work item comes first
      wrong += at.unit != units || at.tile != unit_start(units) + tile;
      wrong += at.next() != (tile == begun - 1);
    }
    while (!at.is_over()) {
      const Unit its(at.unit);
      if ((7 * (threadIdx.x / 32) + 3 * at.unit + 5 * rank) % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      merging.take(its.acc, its.largest, its.total);
      while (!at.next()) {}
    }
    merging.finish();
    struct {
      float largest[2] = {NOTHING, NOTHING}, total[2] = {}, acc[SIZE / 2] = {};
    } one;
    for (int unit = 0; unit < units; ++unit) {
      const Unit its(unit);
      merge(one, its.acc, its.largest, its.total);
    }
    const Merged& found = merging.all;
    wrong += std::memcmp(found.acc, one.acc + rank * OWN, sizeof(found.acc)) != 0;
    wrong += std::memcmp(found.largest, one.largest, sizeof(one.largest)) != 0;
    wrong += std::memcmp(found.total, one.total, sizeof(one.total)) != 0;
    all.wait();
    if (blockIdx.x + threadIdx.x == 0) end_copies();  // before the blocks' memory goes
    all.wait();
  });
  return wrong;
}

// Every row of the tail's warps reaches the computing warps that merge its dimensions; and rows that the tail goes on
// with reach its warps.
extern "C" int check_tail() {
  std::atomic<int> wrong{0};
  Barrier all(SPLITS * 256);
  run_blocks(SPLITS, SPLITS, 256, [&] {
    const int rank = blockIdx.x;
    constexpr u32 IS_HANDED = MEMORY_BYTES - 64;
    Handed& handed = *(Handed*)own_block->memory;
    if (threadIdx.x == 0) {
      barrier_init(IS_HANDED, 1);
      barrier_expect(IS_HANDED, 64 * (SIZE / SPLITS * 4 + 8));
    }
    const Columns its(threadIdx.x / 32, rank);
    columns::ColumnState state;
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * its.block + lane_id() % 4 * 2 + c;
      state.largest[0][c] = largest_of(1, row);
      if (bool(lane_id() & 4) == bool(c)) state.total[0] = total_of(1, row);
      for (int i = 0; i < 2 * STEPS; ++i) {
        const int dimension = columns::value_dimension(i / 2, i % 2);
        state.sums[0][i / 2][c + i % 2 * 2] = sum_of(1, row, dimension);
      }
    }
    all.wait();
    hand_columns({handed, IS_HANDED}, state, its);
    barrier_wait_cluster(IS_HANDED, 0);  // until all bytes have come
    all.wait();
    if (threadIdx.x < 128) {
      const int first = rank * (SIZE / SPLITS);
      Merged found;
      load_rows(found, handed);
      for (int i = 0; i < OWN; ++i) {
        wrong += found.acc[i] != sum_of(1, row_of(i / 2 % 2), first + dimension_of(i));
      }
      for (int r = 0; r < 2; ++r) wrong += found.largest[r] != largest_of(1, row_of(r));
      for (int r = 0; r < 2; ++r) wrong += found.total[r] != total_of(1, row_of(r));
    }
    all.wait();
    Begun& begun = *(Begun*)own_block->memory;
    if (threadIdx.x < 128) {
      const Unit its(2);
      store_rows(begun, rank, its.acc, its.largest, its.total);
    }
    all.wait();
    columns::ColumnState taken;
    load_columns(taken, begun, its.block);
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * its.block + lane_id() % 4 * 2 + c;
      wrong += taken.largest[0][c] != largest_of(2, row);
      for (int i = 0; i < 2 * STEPS; ++i) {
        const int dimension = columns::value_dimension(i / 2, i % 2);
        wrong += taken.sums[0][i / 2][c + i % 2 * 2] != sum_of(2, row, dimension);
      }
    }
    all.wait();
  });
  return wrong;
}
