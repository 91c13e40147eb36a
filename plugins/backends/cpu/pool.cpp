#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <new>

namespace llmctl {
namespace {

constexpr uint64_t kInside = (1u << 15) - 1;
constexpr uint64_t kOpen = 1u << 15;
constexpr uint64_t kGeneration = 1u << 16;
constexpr auto kSpin = std::chrono::microseconds(250);

std::atomic<Pool*> g_instance{nullptr};
std::atomic<int> g_num_threads{1};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pause_or_yield(int spins) {
  if (spins < 4096) {
    pause();
  } else {
    sched_yield();
  }
}

// A forked child has no worker threads: forget the parent's pool, and start one when needed.
void forget_pool() { g_instance.store(nullptr); }

}  // namespace

Pool& Pool::instance() {
  Pool* pool = g_instance.load();
  if (pool == nullptr) {
    static std::once_flag registered;
    std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
    Pool* fresh = new Pool(g_num_threads.load());
    if (g_instance.compare_exchange_strong(pool, fresh)) {
      pool = fresh;  // lives until the process ends: workers may still spin at exit
    } else {
      delete fresh;
    }
  }
  return *pool;
}

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(step_mutex_);
  stop();
  num_threads_ = num_threads;
  g_num_threads.store(num_threads);
}

void* Pool::scratch(int thread) {
  if (scratch_.size() <= static_cast<size_t>(thread)) scratch_.resize(thread + 1, nullptr);
  if (scratch_[thread] == nullptr) {
    scratch_[thread] = std::aligned_alloc(4096, kScratchBytes);
    if (scratch_[thread] == nullptr) throw std::bad_alloc();
  }
  return scratch_[thread];
}

void Pool::start() {
  for (int thread = 0; thread < num_threads_; ++thread) scratch(thread);
  ranges_ = std::vector<Range>(num_threads_);
  for (int thread = 1; thread < num_threads_; ++thread) {
    threads_.emplace_back([this, thread] { work(thread); });
  }
  started_ = true;
}

void Pool::stop() {
  stopping_.store(true);
  wake_sleepers();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  stopping_.store(false);
  started_ = false;
}

int& Pool::own_index() {
  thread_local int index = 0;
  return index;
}

void Pool::take_items() {
  const size_t own = own_index(), count = ranges_.size();
  for (size_t i = 0; i < count; ++i) {
    Range& range = ranges_[own + i < count ? own + i : own + i - count];
    for (int64_t item = range.next.fetch_add(1, std::memory_order_relaxed); item < range.end;
         item = range.next.fetch_add(1, std::memory_order_relaxed)) {
      body_(context_, item, scratch_[own]);
    }
  }
}

void Pool::run(int64_t items, Body body, void* context) {
  if (!started_) start();
  items_ = items;
  body_ = body;
  context_ = context;
  const int64_t count = num_threads_;
  for (int64_t thread = 0; thread < count; ++thread) {
    ranges_[thread].next.store(thread * items / count, std::memory_order_relaxed);
    ranges_[thread].end = (thread + 1) * items / count;
  }
  const uint64_t generation = (state_.load(std::memory_order_relaxed) & ~(kGeneration - 1));
  state_.store(generation + kGeneration + kOpen);
  wake_sleepers();
  take_items();
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    pause_or_yield(spins);  // a worker lost its core in the middle of an item
  }
}

// Take part in what runs, if anything does that this thread has not taken part in; with `of`, only in
// what that runs: while a thread is inside, nothing else can begin.
bool Pool::help(uint64_t& last, const Aside* of) {
  uint64_t state = state_.load(std::memory_order_acquire);
  const uint64_t generation = state & ~(kGeneration - 1);
  if (generation == last || (state & kOpen) == 0) return false;
  if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
  last = generation;
  if (of == nullptr || running_.load() == of) take_items();
  state_.fetch_sub(1, std::memory_order_acq_rel);
  return true;
}

void Pool::work(int thread) {
  own_index() = thread;
  uint64_t last = 0;
  auto idle_since = std::chrono::steady_clock::now();
  for (int spins = 0; !stopping_.load(std::memory_order_relaxed); ++spins) {
    if (help(last, nullptr) || run_aside()) {
      idle_since = std::chrono::steady_clock::now();
    } else if ((spins & 63) == 63 && std::chrono::steady_clock::now() - idle_since > kSpin) {
      sleep(last);
      idle_since = std::chrono::steady_clock::now();
    } else {
      pause();
    }
  }
}

void Pool::sleep(uint64_t seen) {
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] {
    const uint64_t state = state_.load();
    const bool has_work = (state & ~(kGeneration - 1)) != seen && (state & kOpen) != 0;
    return has_work || aside_.load() != nullptr || stopping_.load();
  });
  sleepers_.fetch_sub(1);
}

void Pool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  wake_.notify_all();
}

bool Pool::begin(Aside& aside) {
  if (num_threads_ == 1) return false;
  if (std::unique_lock lock(step_mutex_, std::try_to_lock); lock && !started_) start();
  Aside* none = nullptr;
  if (!aside_.compare_exchange_strong(none, &aside)) return false;
  wake_sleepers();
  return true;
}

// What waits for a worker, unless a step runs: that has all of them.
bool Pool::run_aside() {
  if (aside_.load(std::memory_order_relaxed) == nullptr) return false;
  std::unique_lock lock(step_mutex_, std::try_to_lock);
  Aside* const taken = lock ? aside_.exchange(nullptr) : nullptr;
  if (taken == nullptr) return false;
  running_.store(taken);
  taken->body(*taken);
  running_.store(nullptr);
  taken->is_done.store(true);
  return true;
}

void Pool::end(Aside& aside) {
  Aside* waiting = &aside;
  if (aside_.compare_exchange_strong(waiting, nullptr)) {
    std::lock_guard<std::mutex> lock(step_mutex_);
    aside.body(aside);
    return;
  }
  uint64_t last = 0;
  for (int spins = 0; !aside.is_done.load(); ++spins) {
    if (!help(last, &aside)) pause_or_yield(spins);
  }
}

}  // namespace llmctl
