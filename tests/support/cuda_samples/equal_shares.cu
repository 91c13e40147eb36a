// How contexts that thread blocks share are divided where work items are long (EqualShares of long/share.cuh): for each asked
// number of tiles, and of tiles of a share, how many shares there are and where they begin.
#define TREE 0
#define TAIL_TILES 0
#define ITEM_END 3  // as few_fp8.cu has
#include "ops/paged_attention/long/share.cuh"

extern "C" __global__ void equal_shares(const int* asked, int* found, int count, int room) {
  if (threadIdx.x > 0) return;
  for (int i = 0; i < count; ++i) {
    const EqualShares shares(asked[2 * i + 1]);
    int* its = found + i * room;
    its[0] = shares.count(ContextCost::of(asked[2 * i]));
    for (int nth = 0; nth < its[0] && nth + 1 < room; ++nth) its[nth + 1] = shares.begin(nth);
  }
}
