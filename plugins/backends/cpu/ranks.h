// Ranks of one tensor-parallel run on one machine: what they share is one mapped segment.
//
// The segment holds a counter of meetings and a slot of numbers a rank, in two halves, and a ring of
// bytes that rank 0 writes and every other rank reads. All of it is valid when it is zero but for
// the sizes, which rank 0 writes first. Waiting spins for a moment and then sleeps on a futex; it
// ends early when a rank is lost, whoever found that out.
//
// Halves: a rank writes its slot of one half, meets the others, and reads all slots of that half.
// It writes the same half again two meetings later. By then every rank has come to the meeting
// between, so every rank has read what is overwritten.
#pragma once

#include <atomic>
#include <cstdint>

namespace llmctl {

constexpr int kMaxRanks = 8;
constexpr int64_t kSlotBytes = 4 << 20;  // of one rank in one half: rows beyond come one part after another
constexpr int64_t kRingBytes = 1 << 20;

enum Loss : uint32_t { kNoLoss = 0, kEnded = 1, kLate = 2 };

struct alignas(64) Word {
  std::atomic<uint32_t> value{0};
};

struct alignas(64) Position {
  std::atomic<uint64_t> bytes{0};
};

struct Segment {
  uint32_t num_ranks;
  Word lost;      // 0, or Loss * 256 + the rank, of the first that was lost
  Word sleepers;  // who may sleep on a futex of this segment
  Word meetings[kMaxRanks];
  Word writes, reads;            // count changes of the positions
  Position written;              // bytes that rank 0 has put into the ring
  Position taken[kMaxRanks];     // and that each other rank has taken out
  alignas(64) char ring[kRingBytes];
  alignas(64) float slots[];  // [2 halves][num_ranks][kSlotBytes / 4]
};

// Thrown where a meeting cannot be held.
struct RankLost {
  int rank;
  Loss loss;
};

class Ranks {
 public:
  // limit_ms: how long to wait for another rank; 0: as long as none is lost.
  Ranks(Segment* segment, int rank, int64_t limit_ms)
      : segment_(segment), rank_(rank), limit_ms_(limit_ms) {}

  int count() const { return static_cast<int>(segment_->num_ranks); }
  int rank() const { return rank_; }

  // The slot of a rank in the half that is next met over, or that was just met over.
  float* slot(int rank) const {
    return segment_->slots + ((met_ % 2) * count() + rank) * (kSlotBytes / 4);
  }
  // Wait until every rank has written its slot. `next` is called when all slots were read.
  void meet();
  void next() { ++met_; }

  void write(const char* bytes, int64_t count);
  void read(char* bytes, int64_t count);

 private:
  template <class F>
  void wait(std::atomic<uint32_t>& word, int rank, F&& is_done);

  Segment* segment_;
  int rank_;
  int64_t limit_ms_;
  uint32_t met_ = 0;
};

}  // namespace llmctl
