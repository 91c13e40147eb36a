// What a thread, a thread block and a cluster on a CPU have that kernels do not see.
#pragma once

#include "emulated_warps.h"

#include <deque>
#include <functional>
#include <vector>
#include <ucontext.h>

namespace emu {
struct Transactions {  // an mbarrier
  int count = 0, arrivals = 0, phase = 0, waiting = 0;
  long long bytes = 0;
  void advance() {
    if (arrivals < 0) fail("more arrive at a barrier than it counts");
    if (arrivals || bytes) return;
    arrivals = count, ++phase;
  }
};
struct Cluster {
  Meeting all;
  int threads = 0;
  std::vector<struct OwnBlock*> blocks;
};
struct OwnBlock : Block {
  std::vector<u8> room;
  std::vector<Warp> all_warps;
  std::deque<std::pair<u32, Transactions>> barriers;  // which stay where they are
  std::vector<std::pair<u32, std::function<void()>>> bulk;  // copies that an mbarrier waits for
  Cluster* cluster;
  OwnBlock(int threads, int bytes, Cluster* its) : room(bytes + 1024), all_warps(threads / 32), cluster(its) {
    memory = room.data() + 1024 - (size_t)room.data() % 1024;
    size = bytes, num_warps = threads / 32, warps = all_warps.data();
    std::memset(memory, 0xA5, bytes);
  }
  Transactions& barrier(u32 at) {
    for (auto& known : barriers) if (known.first == at) return known.second;
    barriers.push_back({at, {}});
    return barriers.back().second;
  }
};
struct Copy { u8* to; const u8* from; u32 bytes; };
struct WarpProduct {
  float* d;
  u32 a[4];
  u64 b;
  int columns, add;
  u64 left;  // an operand in shared memory instead of `a`
  bool is_e4m3;
};
struct OwnFiber : Fiber {
  ucontext_t context;  // of its start
  void* place[5];      // where it waits
  bool has_started = false, is_done = false, has_left = false;
  const int* waits_for = nullptr;  // goes on when it is not `seen` any more
  int seen = 0, cluster_turn = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::vector<std::function<void()>> open_stores, stores;
  std::vector<WarpProduct> open_products;
  std::deque<std::vector<WarpProduct>> products;
};
inline OwnFiber& own_fiber() { return *static_cast<OwnFiber*>(now); }
inline OwnBlock& own_block() { return *static_cast<OwnBlock*>(now->own); }
}  // namespace emu
