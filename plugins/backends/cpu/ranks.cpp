// What ranks share: meetings, the ring of commands, and who is lost. See ranks.h.
#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "exports.h"

namespace llmctl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kSlice = std::chrono::milliseconds(50);  // of sleep: how late a lost rank is noticed

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<uint64_t>::is_always_lock_free,
              "processes share them");

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec slice{0, std::chrono::nanoseconds(kSlice).count()};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &slice, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

// One more, and everybody who sleeps on it is woken.
void announce(Segment& segment, std::atomic<uint32_t>& word) {
  word.fetch_add(1);
#if defined(__linux__)
  if (segment.sleepers.value.load() != 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  (void)segment;
#endif
}

void lose(Segment& segment, int rank, Loss loss) {
  uint32_t none = 0;
  segment.lost.value.compare_exchange_strong(none, loss * 256u + static_cast<uint32_t>(rank));
}

void require_none_lost(const Segment& segment) {
  const uint32_t lost = segment.lost.value.load(std::memory_order_relaxed);
  if (lost != 0) throw RankLost{static_cast<int>(lost % 256), static_cast<Loss>(lost / 256)};
}

}  // namespace

// Until is_done(), which a change of `word` by `rank` makes true.
template <class F>
void Ranks::wait(std::atomic<uint32_t>& word, int rank, F&& is_done) {
  const auto start = Clock::now();
  while (!is_done()) {
    if (Clock::now() - start > kSpin) break;
    std::this_thread::yield();
  }
  if (is_done()) return;
  // Only time awake counts: a slice in which all ranks were stopped (Ctrl-Z) is one slice.
  Clock::duration waited{0};
  segment_->sleepers.value.fetch_add(1);
  try {
    for (;;) {
      const auto before = Clock::now();
      const uint32_t seen = word.load();
      if (is_done()) break;
      require_none_lost(*segment_);
      if (limit_ms_ > 0 && waited > std::chrono::milliseconds(limit_ms_)) {
        lose(*segment_, rank, kLate);
        require_none_lost(*segment_);
      }
      sleep_on(word, seen);
      waited += std::min<Clock::duration>(Clock::now() - before, 2 * kSlice);
    }
  } catch (...) {
    segment_->sleepers.value.fetch_sub(1);
    throw;
  }
  segment_->sleepers.value.fetch_sub(1);
}

void Ranks::meet() {
  announce(*segment_, segment_->meetings[rank_].value);
  const uint32_t mine = segment_->meetings[rank_].value.load();
  for (int rank = 0; rank < count(); ++rank) {
    auto& word = segment_->meetings[rank].value;
    wait(word, rank, [&] { return static_cast<int32_t>(word.load() - mine) >= 0; });
  }
}

void Ranks::write(const char* bytes, int64_t count) {
  Segment& s = *segment_;
  require_none_lost(s);
  for (int64_t done = 0; done < count;) {
    const uint64_t at = s.written.bytes.load();
    int64_t room = kRingBytes;  // of the rank that has taken the least
    for (int rank = 1; rank < this->count(); ++rank) {
      auto left = [&] { return kRingBytes - static_cast<int64_t>(at - s.taken[rank].bytes.load()); };
      wait(s.reads.value, rank, [&] { return left() > 0; });
      room = std::min(room, left());
    }
    const int64_t first = static_cast<int64_t>(at % kRingBytes);
    const int64_t some = std::min({room, count - done, kRingBytes - first});
    std::memcpy(s.ring + first, bytes + done, some);
    s.written.bytes.store(at + some);
    announce(s, s.writes.value);
    done += some;
  }
}

void Ranks::read(char* bytes, int64_t count) {
  Segment& s = *segment_;
  for (int64_t done = 0; done < count;) {
    const uint64_t at = s.taken[rank_].bytes.load();
    wait(s.writes.value, 0, [&] { return s.written.bytes.load() != at; });
    const int64_t there = static_cast<int64_t>(s.written.bytes.load() - at);
    const int64_t first = static_cast<int64_t>(at % kRingBytes);
    const int64_t some = std::min({there, count - done, kRingBytes - first});
    std::memcpy(bytes + done, s.ring + first, some);
    s.taken[rank_].bytes.store(at + some);
    announce(s, s.reads.value);
    done += some;
  }
}

namespace {

template <class F>
int32_t guarded(F&& f) {
  try {
    f();
  } catch (const RankLost& lost) {
    return fail_for_rank(lost);
  }
  return kDone;
}

}  // namespace
}  // namespace llmctl

using namespace llmctl;

// Bytes of the segment of so many ranks; 0 if there cannot be so many.
LLMCTL_EXPORT int64_t llmctl_ranks_bytes(int32_t num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) return 0;
  return static_cast<int64_t>(sizeof(Segment)) + 2 * num_ranks * kSlotBytes;
}

// Before any rank joins: `segment` is llmctl_ranks_bytes(num_ranks) zeros.
LLMCTL_EXPORT void llmctl_ranks_init(Segment* segment, int32_t num_ranks) {
  segment->num_ranks = static_cast<uint32_t>(num_ranks);
}

LLMCTL_EXPORT void* llmctl_ranks_join(Segment* segment, int32_t rank, int64_t limit_ms) {
  return new (std::nothrow) Ranks(segment, rank, limit_ms);
}

LLMCTL_EXPORT void llmctl_ranks_leave(void* ranks) { delete static_cast<Ranks*>(ranks); }

// Ends the waiting of all ranks: `rank` has ended.
LLMCTL_EXPORT void llmctl_ranks_lose(Segment* segment, int32_t rank) { lose(*segment, rank, kEnded); }

LLMCTL_EXPORT int32_t llmctl_ranks_write(void* ranks, const char* bytes, int64_t count) {
  return guarded([&] { static_cast<Ranks*>(ranks)->write(bytes, count); });
}

LLMCTL_EXPORT int32_t llmctl_ranks_read(void* ranks, char* bytes, int64_t count) {
  return guarded([&] { static_cast<Ranks*>(ranks)->read(bytes, count); });
}
